"""The committed data, task and base model: what they promise, recomputed."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import make_pairs
from workflow.lib.system.files import file_sha256

ROOT = Path(__file__).resolve().parents[2]
RESOURCES = ROOT / "workflow" / "resources"
BASE = RESOURCES / "base"


def content(path):
    packed = path.read_bytes()
    return gzip.decompress(packed) if path.suffix == ".gz" else packed


def read_jsonl(path):
    return [json.loads(line) for line in content(path).decode().splitlines()]


def run_script(*args, **environment):
    subprocess.run(
        [sys.executable, *map(str, args)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", **environment},
    )


@pytest.fixture(scope="module")
def train():
    return read_jsonl(RESOURCES / "pydocs" / "train.jsonl.gz")


@pytest.fixture(scope="module")
def heldout():
    return read_jsonl(RESOURCES / "pydocs" / "heldout.jsonl.gz")


@pytest.fixture(scope="module")
def manifest():
    return json.loads((RESOURCES / "pydocs" / "manifest.json").read_text())


def test_files_have_the_digests_and_row_counts_of_the_manifest(manifest):
    assert len(manifest["sha256"]) == 5
    for name, digest in manifest["sha256"].items():
        assert hashlib.sha256(content(RESOURCES / name)).hexdigest() == digest
        assert len(read_jsonl(RESOURCES / name)) == manifest["rows"][name]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_pairs_are_made_of_their_own_split_and_are_the_same_each_time(split, request):
    made = list(make_pairs.pairs(split))
    assert made == read_jsonl(RESOURCES / "pydocs" / f"pairs-{split}.jsonl.gz")
    answers = {row["completion"] for row in request.getfixturevalue(split)}
    right = {(row["prompt"], row["completion"]) for row in request.getfixturevalue(split)}
    for pair in made:
        assert (pair["prompt"], pair["chosen"]) in right
        assert pair["rejected"] in answers - {pair["chosen"]}


def test_lm_eval_runs_the_task_offline(tmp_path):
    pytest.importorskip("lm_eval")
    code = (
        "from lm_eval import simple_evaluate\n"
        "from lm_eval.tasks import TaskManager\n"
        "manager = TaskManager(include_path='workflow/resources/tasks', include_defaults=False)\n"
        "found = simple_evaluate('dummy', tasks=['pydocs_mc'], task_manager=manager)\n"
        "assert {'acc,none', 'acc_norm,none'} <= found['results']['pydocs_mc'].keys()\n"
    )
    run_script("-c", code, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def test_base_model_is_the_one_whose_checksum_the_page_names():
    page = (RESOURCES / "README.md").read_text(encoding="utf-8")
    assert file_sha256(BASE / "model.safetensors") in page
    assert file_sha256(BASE / "tokenizer.json") in page


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(BASE)


def test_any_unicode_text_survives_the_tokenizer(tokenizer):
    for text in (
        "naïve “quotes” \u2013 漢字 🐍👩‍🚀",
        " \t\n\r\n  x  ",
        "\x00\u200d\u202e\ufeff",
        "a" * 999,
    ):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text


def test_chat_template_marks_what_the_assistant_says_with_its_end_token(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What does `len` do?"},
        {"role": "assistant", "content": "It counts."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Welcome."},
    ]
    encoded = tokenizer.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    marked = [t for t, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "It counts.<|end|>Welcome.<|end|>"
    assert encoded["input_ids"].count(tokenizer.bos_token_id) == 1
    assert encoded["input_ids"][0] == tokenizer.bos_token_id


def test_generation_prompt_is_a_prefix_of_the_whole_conversation(tokenizer):
    user = {"role": "user", "content": "What does `len` do?"}
    answer = {"role": "assistant", "content": "It counts."}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([user, answer], tokenize=False)
    assert prompt == "<|begin|><|user|>What does `len` do?<|end|><|assistant|>"
    assert whole == f"{prompt}It counts.<|end|>"
