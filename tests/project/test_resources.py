"""The committed data, task and base model: what they promise, recomputed."""

import collections
import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def items():
    return read_jsonl(RESOURCES / "tasks" / "pydocs_mc.jsonl")


def test_there_are_at_least_3000_training_and_300_heldout_pairs(train, heldout):
    assert len(train) >= 3000
    assert len(heldout) >= 300


def test_every_pair_has_a_prompt_a_completion_and_a_source(train, heldout):
    for row in train + heldout:
        assert row.keys() == {"prompt", "completion", "source"}
        assert all(value.strip() for value in row.values())


def test_no_prompt_and_no_completion_comes_twice(train, heldout):
    rows = train + heldout
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert len({" ".join(row["completion"].lower().split()) for row in rows}) == len(rows)


def test_no_completion_is_longer_than_600_characters(train, heldout):
    assert max(len(row["completion"]) for row in train + heldout) <= 600


def test_no_object_is_in_both_splits(train, heldout):
    assert {row["source"] for row in train}.isdisjoint(row["source"] for row in heldout)


def test_files_have_the_digests_and_row_counts_of_the_manifest(manifest):
    assert len(manifest["sha256"]) == 3
    for name, digest in manifest["sha256"].items():
        assert hashlib.sha256(content(RESOURCES / name)).hexdigest() == digest
        assert len(read_jsonl(RESOURCES / name)) == manifest["rows"][name]


def test_no_file_names_a_path_or_an_address_of_the_machine(train, heldout, items):
    text = json.dumps([train, heldout, items])
    for trace in ("/root", "/usr/lib", "site-packages/", " at 0x", str(Path.home())):
        assert trace not in text


def test_each_item_has_four_distinct_choices_of_which_the_right_one_is_heldout(
    items, train, heldout
):
    heldout_sources = {row["source"] for row in heldout}
    train_sources = {row["source"] for row in train}
    assert 150 <= len(items) <= 300
    for item in items:
        assert len(set(item["choices"])) == 4
        assert item["choices"][item["answer"]] == f"`{item['source']}`"
        assert item["source"] in heldout_sources - train_sources


def test_each_position_holds_the_right_answer_equally_often(items):
    counts = collections.Counter(item["answer"] for item in items)
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_choices_of_an_item_come_from_one_class_or_module(items):
    for item in items:
        assert len({choice.rpartition(".")[0] for choice in item["choices"]}) == 1


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


def test_tokenizer_has_distinct_special_tokens_and_a_length(tokenizer):
    specials = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert None not in specials
    assert len(set(specials)) == 3
    assert tokenizer.model_max_length == 1024


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
