"""The stage from end to end: files in, tokens folder out, its arrays and its manifest."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import AutoTokenizer

from tests.support.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.support.tokenizing import (
    LONG,
    NUM_HELDOUT,
    NUM_TRAIN,
    Stage,
    documents_of,
    expected_ids,
    rows,
    save_rows,
)
from tests.system.test_checksums import recorded_as_download
from workflow.lib.data.tokens.token_store import MANIFEST, TokenStore
from workflow.lib.kernels.attention.answer_rows import LengthGroup
from workflow.lib.planning.preflight.checks import read_tokens
from workflow.lib.settings.config import load_config
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256
from workflow.lib.training.batches import attention_costs


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokenizer_folder):
    """The good data, prepared. Never change it."""
    stage = Stage(tmp_path_factory.mktemp("finished"), tokenizer_folder)
    stage.run()
    return stage


def test_packed_documents_are_the_tokenizers_own_ids(finished):
    packed = documents_of(TokenStore.open(finished.output))
    assert sorted(packed) == sorted(tuple(expected_ids(finished, row)) for row in rows(NUM_TRAIN))


def test_heldout_documents_are_the_tokenizers_own_ids_in_file_order(finished):
    read = [ids.tolist() for ids, _ in TokenStore.open(finished.output).heldout_documents()]
    assert read == [expected_ids(finished, row) for row in rows(NUM_HELDOUT, start=1000)]


def test_every_document_has_a_trained_token_and_its_first_is_none(finished):
    store = TokenStore.open(finished.output)
    masks = [*documents_of(store).values(), *(m.tolist() for _, m in store.heldout_documents())]
    assert len(masks) == NUM_TRAIN + NUM_HELDOUT
    assert all(any(mask) and not mask[0] for mask in masks)


def test_changing_one_document_leaves_the_others_as_they_were(stage):
    before = documents_of(stage.run())
    changed = rows(NUM_TRAIN)
    changed[20]["completion"] = "Something else, and longer than it was."
    save_rows(stage.train, changed)
    after = documents_of(stage.run())
    assert len(before.keys() & after.keys()) == NUM_TRAIN - 1
    assert all(before[ids] == after[ids] for ids in before.keys() & after.keys())


def test_seed_changes_the_order_of_rows_and_nothing_else(stage):
    first = np.array(stage.run(seed=0).input_ids)
    second = np.array(stage.run(seed=1).input_ids)
    assert not np.array_equal(first, second)
    assert sorted(first.tolist()) == sorted(second.tolist())


def test_manifest_counts_what_the_arrays_hold(finished):
    store = TokenStore.open(finished.output)
    train = store.manifest["splits"]["train"]
    documents = documents_of(store)
    assert train["tokens"] == sum(len(ids) for ids in documents)
    assert train["trained_tokens"] == int(store.loss_mask.sum())
    assert train["packed_rows"] == store.num_rows
    assert train["fill"] == train["tokens"] / store.input_ids.size
    assert train["length_percentiles"]["max"] == max(len(ids) for ids in documents)
    assert (train["rows_read"], train["rows_kept"], train["rows_dropped"]) == (
        NUM_TRAIN,
        NUM_TRAIN,
        0,
    )
    assert store.manifest["splits"]["heldout"]["documents"] == NUM_HELDOUT


def test_manifest_has_what_attention_costs_with_padding(finished):
    store = TokenStore.open(finished.output)
    lengths = [LengthGroup(*x) for x in store.manifest["splits"]["train"]["lengths"]]
    costs = attention_costs(np.asarray(store.position_ids))
    assert sum(group.squares for group in lengths) == costs.sum()
    assert sum(group.tokens for group in lengths) == store.position_ids.size
    assert sum(group.documents for group in lengths) == (store.position_ids == 0).sum()
    counts = read_tokens(finished.output / MANIFEST)
    assert [*counts.lengths] == lengths


def test_manifest_names_every_file_with_its_digest(finished):
    files = TokenStore.open(finished.output).manifest["files"]
    present = {path.name for path in finished.output.iterdir()} - {"manifest.json"}
    assert files == {name: file_sha256(finished.output / name) for name in present}


def test_format_text_needs_no_chat_template(stage):
    stage.tokenizer = stage.folder / "bare"
    tiny_tokenizer(stage.tokenizer, chat_template=False)
    stage.heldout = None
    save_rows(stage.train, [{"text": f"Fox {n} jumps."} for n in range(NUM_TRAIN)])
    store = stage.run()
    assert store.manifest["format"] == "text"
    assert store.manifest["chat_template_sha256"] is None
    assert store.manifest["chat_template"] is None
    assert store.manifest["end_of_turn_token_ids"] == []


def test_conversations_without_chat_template_stop(stage):
    stage.tokenizer = stage.folder / "bare"
    tiny_tokenizer(stage.tokenizer, chat_template=False)
    with pytest.raises(UserError, match=r"data\.chat_template = null: .* the tokenizer has none"):
        stage.run()


def test_manifest_holds_the_template_and_conversations_as_they_are_trained(stage):
    own = CHAT_TEMPLATE.replace("+ eos_token", "+ '<|user|>'")
    path = stage.folder / "own.jinja"
    path.write_text(own)
    manifest = stage.run(chat_template=str(path)).manifest
    tokenizer = AutoTokenizer.from_pretrained(stage.tokenizer)
    assert manifest["chat_template"] == own
    assert tokenizer.convert_ids_to_tokens(manifest["end_of_turn_token_ids"]) == ["<|user|>"]
    chat = manifest["probes"][1]
    expected = tokenizer.apply_chat_template(chat["messages"], chat_template=own)["input_ids"]
    assert chat["ids"] == expected


def test_tokenizer_without_eos_stops(stage):
    stage.tokenizer = stage.folder / "no-eos"
    tokenizer = tiny_tokenizer(stage.tokenizer, pad=False)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(stage.tokenizer)
    with pytest.raises(UserError, match=r"has no eos token.*tokenizer_config\.json"):
        stage.run()


def test_tokenizer_that_reads_special_tokens_as_text_stops(stage):
    stage.tokenizer = shutil.copytree(stage.tokenizer, stage.folder / "splits")
    path = stage.tokenizer / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"split_special_tokens": True}))
    with pytest.raises(UserError, match=r"split_special_tokens is true.*tokenizer_config\.json"):
        stage.run()


def test_folder_without_tokenizer_stops(stage):
    stage.tokenizer = stage.folder
    with pytest.raises(UserError, match=r"model\.source = .* holds no tokenizer that loads"):
        stage.run()


def test_model_of_absurd_size_stops_before_its_tokenizer_is_built(stage):
    stage.tokenizer = stage.folder / "absurd"
    tiny_tokenizer(stage.tokenizer)
    config = {"model_type": "qwen3", "num_hidden_layers": 10**9}
    (stage.tokenizer / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="num_hidden_layers = 1000000000: must be at most 10,000"):
        stage.run()


def test_without_a_pad_token_no_padding_is_trained_and_every_end_is(stage):
    stage.tokenizer = stage.folder / "unpadded"
    eos = tiny_tokenizer(stage.tokenizer, pad=False).eos_token_id
    store = stage.run(packing=False)
    assert store.manifest["pad_token_origin"] == "eos_token"
    trained_ends = [
        np.count_nonzero(ids[mask] == eos)
        for ids, mask in zip(store.input_ids, store.loss_mask, strict=True)
    ]
    assert trained_ends == [1] * NUM_TRAIN
    assert all(row[-1] == eos for row in store.input_ids)
    assert not store.loss_mask[:, -1].any()


@pytest.mark.parametrize("free", [-1, 0], ids=["own vocabulary", "eos"])
def test_tokenizer_of_another_model_is_counted_whole(stage, free):
    stage.tokenizer = shutil.copytree(stage.tokenizer, stage.folder / "other")
    tokenizer = AutoTokenizer.from_pretrained(stage.tokenizer)
    if free == 0:
        tokenizer.add_special_tokens({"eos_token": "<late>"})
        tokenizer.save_pretrained(stage.tokenizer)
    config = {"model_type": "llama", "vocab_size": tokenizer.vocab_size + free}
    (stage.tokenizer / "config.json").write_text(json.dumps(config))
    assert stage.run().manifest["vocab_size"] == len(tokenizer)


def test_added_token_that_the_model_has_no_row_for_is_in_no_row(stage):
    """The image token of Gemma 3's text models, and a pad token that was only added."""
    stage.tokenizer = stage.folder / "longer"
    tokenizer = tiny_tokenizer(stage.tokenizer, pad=False)
    known = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<more>"})
    tokenizer.save_pretrained(stage.tokenizer)
    config = {"model_type": "llama", "vocab_size": known}
    (stage.tokenizer / "config.json").write_text(json.dumps(config))
    spelled = {"prompt": "Question?", "completion": "An answer of <more> tokens."}
    save_rows(stage.train, [*rows(NUM_TRAIN), spelled])
    store = stage.run(special_tokens_in_text="tokens", max_rejected_share=0.5)
    assert (store.manifest["vocab_size"], store.manifest["pad_token_origin"]) == (
        known,
        "eos_token",
    )
    assert store.input_ids.max() < known
    (dropped,) = map(json.loads, (stage.output / "rejects.jsonl").read_text().splitlines())
    assert f"id {known}, the model's embedding has {known} rows" in dropped["reason"]


def test_source_of_weight_two_is_trained_twice_and_of_one_half_half(stage):
    twice = save_rows(stage.folder / "twice.jsonl", rows(10, start=100))
    half = save_rows(stage.folder / "half.jsonl", rows(10, start=200))
    sources = [
        str(stage.train),
        {"path": str(twice), "name": "twice", "weight": 2},
        {"path": str(half), "name": "half", "weight": 0.5},
    ]
    store = stage.run(train=sources, packing=False)
    train = store.manifest["splits"]["train"]
    assert (train["rows_kept"], train["documents"]) == (NUM_TRAIN + 20, NUM_TRAIN + 25)
    assert train["duplicates"] == 0
    assert store.num_rows == NUM_TRAIN + 25
    shown = [(s["source"], s["weight"]) for s in store.manifest["sources"] if s["weight"] != 1]
    assert shown == [("twice", 2.0), ("half", 0.5)]


def test_sources_of_different_formats_are_trained_together(stage):
    (stage.folder / "book.txt").write_text("A plain text.")
    store = stage.run(train=[str(stage.train), str(stage.folder / "book.txt")])
    assert store.manifest["format"] == "prompt_completion, text"
    assert store.manifest["splits"]["train"]["documents"] == NUM_TRAIN + 1


def test_manifest_shows_lengths_and_shares(stage):
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG])
    manifest = stage.run().manifest
    train = manifest["splits"]["train"]
    full = len(expected_ids(stage, LONG))
    assert train["longest"][0] == {"file": str(stage.train), "row": NUM_TRAIN + 1, "tokens": full}
    first, second = manifest["sources"]
    assert (first["tokens"], first["trained_tokens"]) == (train["tokens"], train["trained_tokens"])
    assert (first["token_share"], second["token_share"], second["split"]) == (1.0, 1.0, "heldout")


def test_demo_fills_its_rows_to_99_percent(tmp_path):
    """By the settings of config.yaml, on the data and with the tokenizer that come with it:
    99.5%."""
    demo = load_config(yaml.safe_load(Path("config.yaml").read_text(encoding="utf-8")))[1]["demo"]
    assert demo.data.packing
    store = Stage(tmp_path, Path(demo.model.source)).run(**demo.data.model_dump(mode="json"))
    assert store.num_rows > 500
    assert store.manifest["splits"]["train"]["fill"] >= 0.99


@pytest.fixture
def downloaded(stage):
    stage.dataset = stage.folder / "hub-data"
    stage.dataset.mkdir()
    save_rows(stage.dataset / "train.jsonl", rows(NUM_TRAIN))
    save_rows(stage.dataset / "heldout.jsonl", rows(3, start=1000))
    stage.tokenizer = shutil.copytree(stage.tokenizer, stage.folder / "hub-model")
    for folder in (stage.dataset, stage.tokenizer):
        recorded_as_download(folder)
    return stage


NAMES = {"train": "train.jsonl", "heldout": "heldout.jsonl"}  # in the dataset


@pytest.mark.parametrize("name", ["hub-data/train.jsonl", "hub-model/tokenizer.json"])
def test_damaged_download_is_named_and_not_tokenized(downloaded, name):
    path = downloaded.folder / name
    path.write_text(path.read_text().replace("a", "b", 1))
    with pytest.raises(UserError, match=f"^{path} is damaged: it does not have the SHA-256"):
        downloaded.run(**NAMES)
    assert not downloaded.output.exists()


def test_weights_of_rows_are_stored_beside_the_same_tokens(stage):
    plain = stage.run()
    expected = documents_of(plain)
    assert plain.weights is None
    assert "weights" not in plain.manifest["splits"]["train"]
    weights = {0: 0.5, 1: 2, 2: 1, 3: 0}
    changed = [{**row, **({"weight": weights[n]} if n in weights else {})}
               for n, row in enumerate(rows(NUM_TRAIN))]  # fmt: skip
    save_rows(stage.train, changed)
    store = stage.run(overlong="truncate", max_rejected_share=0.05)
    assert store.weights is not None
    assert np.array_equal(store.weights > 0, store.loss_mask)
    by_ids = documents_of(store, of=store.weights)
    for number, row in enumerate(rows(NUM_TRAIN)):
        ids = tuple(expected_ids(stage, row))
        weight = weights.get(number, 1)
        if weight:
            assert by_ids[ids] == [weight * trained for trained in expected[ids]]
        else:
            assert ids not in by_ids
    facts = store.manifest["splits"]["train"]["weights"]
    assert (facts["smallest"], facts["largest"]) == (0.5, 2.0)
    assert facts["tokens"] == np.count_nonzero((store.weights > 0) & (store.weights != 1))
    assert set(store.manifest["files"]) >= {"train.weights.npy"}
