"""The committed data, task and base model: what they promise, recomputed."""

import collections
import json
import os
import platform
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from workflow.resources import build_pydocs
from workflow.resources.pydocs_builder import near_duplicates
from workflow.resources.pydocs_builder.corpus import protected_texts
from workflow.resources.pydocs_builder.pairs import Pair
from workflow.resources.pydocs_builder.splits import Split

ROOT = Path(__file__).resolve().parents[2]
RESOURCES = ROOT / "workflow" / "resources"
BASE = RESOURCES / "base"
needs_base = pytest.mark.skipif(not BASE.exists(), reason="pretrain_base.py has not run yet")


def read_jsonl(path):
    return [json.loads(line) for line in build_pydocs.content_of(path).decode().splitlines()]


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


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rebuilt")
    script = RESOURCES / "build_pydocs.py"
    run_script(script, "--output", folder, "--corpus", folder / "corpus.jsonl", PYTHONHASHSEED="1")
    return folder


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A base model after two steps on three hundred tiny documents."""
    folder = tmp_path_factory.mktemp("pretrained")
    corpus = folder / "corpus.jsonl"
    rows = ({"text": f"Document {i} says that {i} squared is {i * i}."} for i in range(300))
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_script(
        *(RESOURCES / "pretrain_base.py", "--corpus", corpus, "--output", folder / "base"),
        *("--steps", 2, "--batch-size", 3, "--seq-len", 37, "--vocab-size", 307),
        *("--device", "cpu"),
    )
    return folder / "base"


@pytest.fixture(params=["fresh", pytest.param("committed", marks=needs_base)])
def tokenizer(request):
    transformers = pytest.importorskip("transformers")
    folder = BASE if request.param == "committed" else request.getfixturevalue("pretrained")
    return transformers.AutoTokenizer.from_pretrained(folder)


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
    assert len({near_duplicates.normalised(row["completion"]) for row in rows}) == len(rows)


def test_no_completion_is_longer_than_600_characters(train, heldout):
    assert max(len(row["completion"]) for row in train + heldout) <= 600


def test_no_object_is_in_both_splits(train, heldout):
    assert {row["source"] for row in train}.isdisjoint(row["source"] for row in heldout)


def test_no_heldout_pair_nearly_repeats_a_training_pair(train, heldout):
    assert near_duplicates.near_duplicates(heldout, train) == []


def test_one_changed_word_in_twenty_is_a_near_duplicate_and_other_words_are_not():
    text = " ".join(f"word{i}" for i in range(20))
    index = near_duplicates.ShingleIndex([text])
    assert index.has_near_duplicate(text.replace("word10", "other"))
    assert not index.has_near_duplicate(text.replace("word", "term"))


def test_jaccard_similarity_of_one_half_is_a_near_duplicate_and_just_below_is_not():
    seven_words = near_duplicates.ShingleIndex(["a b c d e f g"])  # 3 shingles
    assert seven_words.has_near_duplicate("a b c d e f h")  # 2 shared of 4
    assert not seven_words.has_near_duplicate("a b c d e x y")  # 1 shared of 5


def test_files_have_the_digests_and_row_counts_of_the_manifest(manifest):
    assert len(manifest["sha256"]) == 3
    for name, digest in manifest["sha256"].items():
        assert build_pydocs.sha256_of(RESOURCES / name) == digest
        assert len(read_jsonl(RESOURCES / name)) == manifest["rows"][name]


def test_rebuilding_gives_the_same_files_whatever_the_hash_seed(rebuilt, manifest, tmp_path):
    """On the Python that the committed files come from, those, which were built with another seed;
    on any other, those of a second build.
    """
    here = (platform.python_version(), platform.system(), ssl.OPENSSL_VERSION)
    there = (manifest["python_version"], manifest["system"], manifest["openssl"])
    if here == there:
        other, names = RESOURCES, [*manifest["sha256"], "pydocs/manifest.json"]
    else:
        script = RESOURCES / "build_pydocs.py"
        run_script(script, "--output", tmp_path, "--corpus", tmp_path / "corpus.jsonl")
        other, names = tmp_path, [p.relative_to(tmp_path) for p in tmp_path.rglob("*.*")]
    assert len(names) >= 4
    for name in names:
        assert build_pydocs.content_of(rebuilt / name) == build_pydocs.content_of(other / name)


def test_the_corpus_holds_no_heldout_answer(rebuilt):
    rows = read_jsonl(rebuilt / "pydocs" / "heldout.jsonl.gz")
    split = Split([], [Pair(**row) for row in rows], moved_pairs=0, moved_sources=0)
    index = near_duplicates.ShingleIndex(protected_texts(split))
    documents = [row["text"] for row in read_jsonl(rebuilt / "corpus.jsonl")]
    assert sum(map(len, documents)) > 1_000_000
    assert [document for document in documents if index.contained_in(document)] == []


def test_no_file_names_a_path_or_an_address_of_the_machine(train, heldout, items):
    text = json.dumps([train, heldout, items])
    for trace in ("/root", "/usr/lib", "site-packages/", " at 0x", str(Path.home())):
        assert trace not in text


def test_resources_without_the_model_are_smaller_than_3_mb():
    files = [p for p in RESOURCES.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files if BASE not in p.parents) < 3_000_000


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


def test_pretraining_writes_a_model_that_loads_and_says_how_it_was_made(pretrained):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
    assert str(model.dtype) == "torch.bfloat16"
    assert model.config.vocab_size == 307
    record = json.loads((pretrained / "training.json").read_text())
    assert record["steps"] == 2
    assert record["tokens"] == 2 * 3 * 37
    assert 0 < record["validation_loss"] < 7  # ln 307 = 5.7 at random
    assert str(pretrained.parent) not in json.dumps(record)


def test_pretraining_leaves_no_optimizer_state(pretrained):
    assert {path.suffix for path in pretrained.iterdir()} <= {".safetensors", ".json", ".jinja"}


@needs_base
def test_base_weights_are_at_most_8_mb_of_bfloat16():
    safetensors = pytest.importorskip("safetensors")
    path = BASE / "model.safetensors"
    assert path.stat().st_size <= 8_000_000
    with safetensors.safe_open(path, "pt") as file:
        names = list(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}


@needs_base
def test_base_model_was_trained_on_the_corpus_of_this_split(rebuilt, manifest):
    if build_pydocs.sha256_of(rebuilt / "pydocs" / "manifest.json") != build_pydocs.sha256_of(
        RESOURCES / "pydocs" / "manifest.json"
    ):
        pytest.skip("another Python builds another corpus")
    record = json.loads((BASE / "training.json").read_text())
    assert record["corpus_sha256"] == build_pydocs.sha256_of(rebuilt / "corpus.jsonl")


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
