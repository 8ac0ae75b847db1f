"""The stage from end to end: files in, tokens folder out, every row accounted for, mistakes explained."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from workflow.lib.artifacts import file_sha256, read_jsonl
from workflow.lib.config import DataConfig
from workflow.lib.corpus import FEW_CHUNKS
from workflow.lib.errors import UserError
from workflow.lib.tokens import ARRAYS, TokenStore
from workflow.scripts.command import stage_parser
from workflow.scripts.tokenize_dataset import main, make_splits

SEQ_LEN = 61  # prime
NUM_TRAIN, NUM_HELDOUT = 53, 7


def rows(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Question {n}?", "completion": f"The answer is {'very ' * (n % 5)}{n}."}
        for n in range(start, start + count)
    ]


def save_rows(path: Path, content: list[Any]) -> Path:
    lines = [item if isinstance(item, str) else json.dumps(item) for item in content]
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return folder


class Stage:
    """One place to run the stage in, with good data to begin with."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.train = save_rows(folder / "train.jsonl", rows(NUM_TRAIN))
        self.heldout: Path | None = save_rows(
            folder / "heldout.jsonl", rows(NUM_HELDOUT, start=1000)
        )
        self.output = folder / "tokens"
        self.rejects = folder / "tokens.rejects.jsonl"
        self.processes = 1

    def config(self, **settings: Any) -> dict[str, Any]:
        heldout = None if self.heldout is None else str(self.heldout)
        names = {"train": str(self.train), "heldout": heldout, "seq_len": SEQ_LEN}
        names["near_duplicates"] = "keep"  # these rows are all alike
        return {"data": DataConfig.model_validate(names | settings).model_dump(mode="json")}

    def run(self, **settings: Any) -> TokenStore:
        parser = stage_parser("")
        for option in ("dataset", "tokenizer", "output"):
            parser.add_argument(f"--{option}", type=Path, default=Path())
        parser.add_argument("--processes", type=int)
        main(parser.parse_args(["--config", json.dumps(self.config(**settings)), *self.options()]))
        return TokenStore.open(self.output)

    def options(self) -> list[str]:
        folders = ["--tokenizer", str(self.tokenizer), "--output", str(self.output)]
        return [*folders, "--processes", str(self.processes)]


@pytest.fixture
def stage(tmp_path: Path, tokenizer_folder: Path) -> Stage:
    return Stage(tmp_path, tokenizer_folder)


def documents_of(store: TokenStore) -> dict[tuple[int, ...], list[bool]]:
    """Every document of the training rows, padding left out, with its mask."""
    found = {}
    for ids, mask, positions in zip(
        store.input_ids, store.loss_mask, store.position_ids, strict=True
    ):
        edges = [*np.flatnonzero(positions == 0).tolist(), store.seq_len]
        for start, stop in pairwise(edges):
            if mask[start:stop].any():
                found[tuple(ids[start:stop].tolist())] = mask[start:stop].tolist()
    return found


def expected_ids(stage: Stage, row: dict[str, Any]) -> list[int]:
    tokenizer = tiny_tokenizer(stage.folder / "again")
    messages = [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["completion"]},
    ]
    ids: list[int] = tokenizer.apply_chat_template(messages)["input_ids"]
    return ids


def test_packed_documents_are_the_tokenizers_own_ids(stage: Stage) -> None:
    packed = documents_of(stage.run())
    assert sorted(packed) == sorted(tuple(expected_ids(stage, row)) for row in rows(NUM_TRAIN))


def test_heldout_documents_are_the_tokenizers_own_ids_in_file_order(stage: Stage) -> None:
    read = [ids.tolist() for ids, _ in stage.run().heldout_documents()]
    assert read == [expected_ids(stage, row) for row in rows(NUM_HELDOUT, start=1000)]


def test_every_document_has_a_trained_token_and_its_first_is_none(stage: Stage) -> None:
    store = stage.run()
    masks = [*documents_of(store).values(), *(m.tolist() for _, m in store.heldout_documents())]
    assert len(masks) == NUM_TRAIN + NUM_HELDOUT
    assert all(any(mask) and not mask[0] for mask in masks)


def test_changing_one_document_leaves_the_others_as_they_were(stage: Stage) -> None:
    before = documents_of(stage.run())
    changed = rows(NUM_TRAIN)
    changed[20]["completion"] = "Something else, and longer than it was."
    save_rows(stage.train, changed)
    after = documents_of(stage.run())
    assert len(before.keys() & after.keys()) == NUM_TRAIN - 1
    assert all(before[ids] == after[ids] for ids in before.keys() & after.keys())


def test_changing_a_word_for_one_of_equal_length_changes_its_places_alone(stage: Stage) -> None:
    first = stage.run()
    ids, positions = np.array(first.input_ids), np.array(first.position_ids)
    changed = rows(NUM_TRAIN)
    changed[20]["prompt"] = changed[20]["prompt"].replace("2", "7")
    save_rows(stage.train, changed)
    second = stage.run()
    assert np.count_nonzero(second.input_ids != ids) == 1
    assert np.array_equal(second.position_ids, positions)


def test_two_runs_write_the_same_bytes(stage: Stage) -> None:
    digests = [
        [file_sha256(stage.run().manifest and stage.output / name) for name in ARRAYS]
        for _ in range(2)
    ]
    assert digests[0] == digests[1]


def test_seed_changes_the_order_of_rows_and_nothing_else(stage: Stage) -> None:
    first = np.array(stage.run(seed=0).input_ids)
    second = np.array(stage.run(seed=1).input_ids)
    assert not np.array_equal(first, second)
    assert sorted(first.tolist()) == sorted(second.tolist())


def test_manifest_counts_what_the_arrays_hold(stage: Stage) -> None:
    store = stage.run()
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


def test_manifest_names_every_file_with_its_digest(stage: Stage) -> None:
    files = stage.run().manifest["files"]
    present = {path.name for path in stage.output.iterdir()} - {"manifest.json"}
    assert files == {name: file_sha256(stage.output / name) for name in present}


def test_samples_show_what_is_trained(stage: Stage) -> None:
    samples = stage.run().manifest["samples"]
    assert len(samples) == 3
    assert samples[0] == [
        ["<|begin|><|user|>Question 0?<|end|><|assistant|>", False],
        ["The answer is 0.<|end|>", True],
    ]


def test_without_packing_each_document_has_a_padded_row(stage: Stage) -> None:
    store = stage.run(packing=False)
    assert store.num_rows == NUM_TRAIN
    assert all(np.count_nonzero(row == 0) <= 2 for row in store.position_ids)
    assert len(documents_of(store)) == NUM_TRAIN


def test_bad_rows_are_listed_by_line_and_counted(stage: Stage) -> None:
    bad = ["{broken", "[1]", {"prompt": "q"}, {"prompt": "q", "completion": ""}]
    save_rows(stage.train, [*rows(2), *bad, *rows(100, start=2)])
    store = stage.run(max_rejected_share=0.04)
    listed = read_jsonl(stage.output / "rejects.jsonl")
    assert [line["row"] for line in listed] == [3, 4, 5, 6]
    assert {line["file"] for line in listed} == {str(stage.train)}
    assert listed[0]["preview"] == "{broken"
    assert store.manifest["dropped_by_reason"] == {
        "broken JSON": 1,
        "not an object": 1,
        "missing column": 1,
        "empty": 1,
    }
    train = store.manifest["splits"]["train"]
    assert (train["rows_read"], train["rows_kept"], train["rows_dropped"]) == (106, 102, 4)


def test_too_many_bad_rows_stop_with_counts_reasons_and_a_list_that_stays(stage: Stage) -> None:
    save_rows(stage.train, [*rows(20), "{broken"])
    with pytest.raises(UserError) as caught:
        stage.run()
    text = str(caught.value)
    assert "data.max_rejected_share = 0.01: 1 of 21 rows" in text
    assert "row 21: broken JSON: " in text
    assert str(stage.rejects) in text
    assert [line["row"] for line in read_jsonl(stage.rejects)] == [21]
    assert not stage.output.exists()


def test_the_list_beside_the_output_goes_once_the_run_succeeds(stage: Stage) -> None:
    save_rows(stage.train, ["{broken"])
    with pytest.raises(UserError):
        stage.run()
    save_rows(stage.train, rows(NUM_TRAIN))
    stage.run()
    assert not stage.rejects.exists()


def test_failure_leaves_a_finished_folder_alone_and_nothing_half_done(stage: Stage) -> None:
    stage.run()
    save_rows(stage.train, ["{broken"])
    with pytest.raises(UserError):
        stage.run()
    assert TokenStore.open(stage.output).num_rows
    assert not list(stage.folder.glob(".*"))


LONG = {"prompt": "q", "completion": "long " * SEQ_LEN}
LONG_PROMPT = {"prompt": "long " * SEQ_LEN, "completion": "a"}


def test_overlong_row_is_cut_at_the_end_and_listed(stage: Stage) -> None:
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG])
    store = stage.run()
    full = expected_ids(stage, LONG)
    assert tuple(full[:SEQ_LEN]) in documents_of(store)
    assert store.manifest["splits"]["train"]["truncated"] == 1
    assert store.manifest["splits"]["train"]["length_percentiles"]["max"] == len(full)
    (line,) = read_jsonl(stage.output / "truncated.jsonl")
    assert (line["row"], line["tokens"]) == (NUM_TRAIN + 1, len(full))


def test_overlong_row_that_is_dropped_counts_but_stops_nothing(stage: Stage) -> None:
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG])
    store = stage.run(overlong="drop", max_rejected_share=0.0)
    assert store.manifest["dropped_by_reason"] == {"overlong": 1}
    assert store.manifest["splits"]["train"]["rows_dropped"] == 1


def test_overlong_row_that_is_split_becomes_several_documents(stage: Stage) -> None:
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG, LONG_PROMPT])
    store = stage.run(overlong="split")
    full = expected_ids(stage, LONG)
    pieces = [tuple(full[start : start + SEQ_LEN]) for start in range(0, len(full), SEQ_LEN)]
    assert len(pieces) > 2
    assert set(pieces) <= documents_of(store).keys()
    whole, prompt = read_jsonl(stage.output / "truncated.jsonl")
    assert (whole["tokens"], whole["documents"], whole["kept"]) == (
        len(full),
        len(pieces),
        len(full),
    )
    assert prompt["documents"] == 1  # what comes before the answer trains nothing
    train = store.manifest["splits"]["train"]
    assert (train["rows_kept"], train["truncated"]) == (NUM_TRAIN + 2, 2)
    assert train["documents"] == NUM_TRAIN + len(pieces) + 1


def test_row_whose_cut_leaves_nothing_trained_is_dropped(stage: Stage) -> None:
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG_PROMPT])
    store = stage.run(max_rejected_share=0.0)
    assert store.manifest["dropped_by_reason"] == {"no trained token within seq_len": 1}
    assert store.manifest["splits"]["train"]["truncated"] == 0


def test_share_of_the_training_file_is_held_out_if_no_file_is_given(stage: Stage) -> None:
    stage.heldout = None
    save_rows(stage.train, ["", *rows(NUM_TRAIN - 1), "{broken"])  # line 1 is no row
    store = stage.run(heldout_share=0.2, max_rejected_share=0.1)
    splits = store.manifest["splits"]
    assert splits["heldout"]["rows_read"] == round(0.2 * NUM_TRAIN)
    assert splits["train"]["rows_read"] + splits["heldout"]["rows_read"] == NUM_TRAIN
    assert splits["train"]["rows_dropped"] + splits["heldout"]["rows_dropped"] == 1
    heldout = {tuple(ids.tolist()) for ids, _ in store.heldout_documents()}
    assert len(heldout | documents_of(store).keys()) == NUM_TRAIN - 1


def test_seed_decides_which_rows_are_held_out(stage: Stage) -> None:
    stage.heldout = None
    first, again, other = (
        {tuple(ids.tolist()) for ids, _ in stage.run(seed=seed).heldout_documents()}
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_training_rows_are_taken_out_of_the_heldout_ones(stage: Stage) -> None:
    assert stage.heldout is not None
    save_rows(stage.heldout, [*rows(NUM_HELDOUT, start=1000), *rows(2)])
    store = stage.run()
    heldout = store.manifest["splits"]["heldout"]
    assert store.num_heldout_documents == NUM_HELDOUT
    assert store.manifest["train_heldout_overlap"] == 2
    assert (heldout["rows_read"], heldout["rows_kept"], heldout["rows_dropped"]) == (9, 7, 2)
    first, _ = read_jsonl(stage.output / "rejects.jsonl")
    assert first["row"] == NUM_HELDOUT + 1
    assert first["reason"] == "duplicate of a training row"
    assert "Question 0?" in first["preview"]


STORY = (
    "In a village by the sea there lived an old fisherman who mended nets every evening while his "
    "daughter read him letters from far away, and nobody knew who had written them or why."
)
STRANGER = "Matrices that are symmetric have real eigenvalues and orthogonal eigenvectors, always."


def stories(stage: Stage) -> None:
    """Save one training row that a held-out row nearly repeats, among rows that nothing repeats."""
    assert stage.heldout is not None
    save_rows(stage.train, [*rows(NUM_TRAIN), {"prompt": "Tell.", "completion": STORY}])
    changed = STORY.replace("old fisherman", "OLD, tired fisherman")
    pairs = [("Tell.", changed), ("Explain.", STRANGER)]
    save_rows(stage.heldout, [{"prompt": p, "completion": c} for p, c in pairs])


def test_near_duplicates_of_training_rows_are_taken_out_of_the_heldout_ones(stage: Stage) -> None:
    stories(stage)
    store = stage.run(near_duplicates="remove", seq_len=256)
    assert (store.num_heldout_documents, store.manifest["train_heldout_near_duplicates"]) == (1, 1)
    (line,) = read_jsonl(stage.output / "rejects.jsonl")
    assert line["row"] == 1
    assert f"row {NUM_TRAIN + 1} of {stage.train}" in line["reason"]
    assert store.manifest["dropped_by_reason"] == {"near-duplicate of a training row": 1}


def test_near_duplicates_can_be_refused_or_kept(stage: Stage) -> None:
    stories(stage)
    with pytest.raises(
        UserError, match=r"data\.near_duplicates = 'refuse': 1 held-out rows .*\n  row 1: "
    ):
        stage.run(near_duplicates="refuse", seq_len=256)
    store = stage.run(near_duplicates="keep", seq_len=256)
    assert (store.num_heldout_documents, store.manifest["train_heldout_near_duplicates"]) == (2, 1)


def test_threshold_decides_what_is_a_near_duplicate(stage: Stage) -> None:
    stories(stage)
    settings = {"near_duplicates": "remove", "near_duplicate_threshold": 0.95, "seq_len": 256}
    assert stage.run(**settings).num_heldout_documents == 2


def test_duplicates_are_counted_and_kept(stage: Stage) -> None:
    save_rows(stage.train, [*rows(NUM_TRAIN), *rows(3)])
    train = stage.run().manifest["splits"]["train"]
    assert (train["duplicates"], train["rows_kept"]) == (3, NUM_TRAIN + 3)


def test_split_without_any_document_stops(stage: Stage) -> None:
    assert stage.heldout is not None
    save_rows(stage.heldout, rows(3))  # all of them training rows
    with pytest.raises(UserError, match=r"data\.heldout: no document is left .* 3 of them dropped"):
        stage.run()


def test_one_row_cannot_be_two_splits(stage: Stage) -> None:
    stage.heldout = None
    save_rows(stage.train, rows(1))
    with pytest.raises(UserError, match=r"data\.train: no document is left for the split train"):
        stage.run()


def test_heldout_file_needs_columns_of_some_format(stage: Stage) -> None:
    assert stage.heldout is not None
    save_rows(stage.heldout, [{"body": "x"}])
    with pytest.raises(UserError, match=r"data\.heldout has the columns body, but expected"):
        stage.run()


def test_file_of_broken_rows_alone_is_listed_row_by_row(stage: Stage) -> None:
    save_rows(stage.train, ["{broken", "[]"])
    with pytest.raises(UserError, match="2 of 2 rows"):
        stage.run()
    assert len(read_jsonl(stage.rejects)) == 2


def test_special_token_in_the_data_is_encoded_as_text_and_counted(stage: Stage) -> None:
    save_rows(
        stage.train, [*rows(NUM_TRAIN), {"prompt": "What is <|end|>?", "completion": "Text."}]
    )
    store = stage.run()
    tokenizer = tiny_tokenizer(stage.folder / "again")
    assert store.manifest["sources"][0]["special_token_texts"] == 1
    hostile = [ids for ids in documents_of(store) if "<|end|>?" in tokenizer.decode(list(ids))]
    assert [ids.count(tokenizer.eos_token_id) for ids in hostile] == [2]


def test_format_text_needs_no_chat_template(stage: Stage) -> None:
    stage.tokenizer = stage.folder / "bare"
    tiny_tokenizer(stage.tokenizer, chat_template=False)
    stage.heldout = None
    save_rows(stage.train, [{"text": f"Fox {n} jumps."} for n in range(NUM_TRAIN)])
    store = stage.run()
    assert store.manifest["format"] == "text"
    assert store.manifest["chat_template_sha256"] is None


def test_conversations_without_chat_template_stop(stage: Stage) -> None:
    stage.tokenizer = stage.folder / "bare"
    tiny_tokenizer(stage.tokenizer, chat_template=False)
    with pytest.raises(UserError, match=r"data\.chat_template = None: .* the tokenizer has none"):
        stage.run()


def test_chat_template_file_replaces_the_tokenizers(stage: Stage) -> None:
    path = stage.folder / "template.jinja"
    path.write_text(CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}Hello"))
    (sample, *_) = stage.run(chat_template=str(path)).manifest["samples"]
    assert sample[0][0].startswith("<|begin|>Hello<|user|>")


def test_without_pad_token_rows_are_filled_with_eos_that_is_never_trained(stage: Stage) -> None:
    stage.tokenizer = stage.folder / "no-pad"
    tokenizer = tiny_tokenizer(stage.tokenizer, pad=False)
    store = stage.run(packing=False)
    assert store.manifest["pad_token_id"] == tokenizer.eos_token_id
    assert store.manifest["pad_token_origin"] == "eos_token"
    assert len(documents_of(store)) == NUM_TRAIN


def test_tokenizer_without_eos_stops(stage: Stage) -> None:
    stage.tokenizer = stage.folder / "no-eos"
    tokenizer = tiny_tokenizer(stage.tokenizer, pad=False)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(stage.tokenizer)
    with pytest.raises(UserError, match=r"has no eos token.*tokenizer_config\.json"):
        stage.run()


def test_folder_without_tokenizer_stops(stage: Stage) -> None:
    stage.tokenizer = stage.folder
    with pytest.raises(UserError, match=r"model\.source = .* holds no tokenizer that loads"):
        stage.run()


def test_without_a_pad_token_no_padding_is_trained_and_every_end_is(stage: Stage) -> None:
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


def test_rows_of_several_files_keep_their_file_and_line(stage: Stage) -> None:
    stage.heldout = None
    folder = stage.folder / "parts"
    folder.mkdir()
    save_rows(folder / "b.jsonl", ["{broken", *rows(20, start=20)])
    save_rows(folder / "a.jsonl", [*rows(20), "{broken"])
    store = stage.run(train=str(folder / "*.jsonl"), max_rejected_share=0.1)
    listed = read_jsonl(stage.output / "rejects.jsonl")
    assert [(line["file"], line["row"]) for line in listed] == [
        (str(folder / "a.jsonl"), 21),
        (str(folder / "b.jsonl"), 1),
    ]
    assert [(s["file"], s["rows"]) for s in store.manifest["sources"]] == [
        (str(folder / "a.jsonl"), 21),
        (str(folder / "b.jsonl"), 21),
    ]


def test_source_of_weight_two_is_trained_twice_and_of_one_half_half(stage: Stage) -> None:
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


def test_sources_of_different_formats_are_trained_together(stage: Stage) -> None:
    (stage.folder / "book.txt").write_text("A plain text.")
    store = stage.run(train=[str(stage.train), str(stage.folder / "book.txt")])
    assert store.manifest["format"] == "prompt_completion, text"
    assert store.manifest["splits"]["train"]["documents"] == NUM_TRAIN + 1


def test_manifest_shows_lengths_and_shares(stage: Stage) -> None:
    save_rows(stage.train, [*rows(NUM_TRAIN), LONG])
    manifest = stage.run().manifest
    train = manifest["splits"]["train"]
    histogram, full = train["length_histogram"], len(expected_ids(stage, LONG))
    assert sum(histogram["counts"]) == NUM_TRAIN + 1
    assert (histogram["edges"][-2:], histogram["counts"][-1]) == ([SEQ_LEN + 1, full + 1], 1)
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1
    assert train["longest"][0] == {"file": str(stage.train), "row": NUM_TRAIN + 1, "tokens": full}
    first, second = manifest["sources"]
    assert (first["tokens"], first["trained_tokens"]) == (train["tokens"], train["trained_tokens"])
    assert (first["token_share"], second["token_share"], second["split"]) == (1.0, 1.0, "heldout")


def test_every_held_out_document_knows_its_source(stage: Stage) -> None:
    more = save_rows(stage.folder / "more.jsonl", rows(3, start=2000))
    named = [
        {"path": str(stage.heldout), "name": "first"},
        {"path": str(more), "name": "more"},
    ]
    store = stage.run(heldout=named)
    assert store.heldout_sources() == ["first"] * NUM_HELDOUT + ["more"] * 3


def test_sources_of_documents_split_off_are_told_too(stage: Stage) -> None:
    stage.heldout = None
    others = rows(40, start=2000)
    more = save_rows(stage.folder / "more.jsonl", others)
    named = [{"path": str(stage.train), "name": "first"}, {"path": str(more), "name": "more"}]
    store = stage.run(train=named, heldout_share=0.5)
    from_more = {tuple(expected_ids(stage, row)) for row in others}
    documents = [tuple(ids.tolist()) for ids, _ in store.heldout_documents()]
    told = ["more" if ids in from_more else "first" for ids in documents]
    assert store.heldout_sources() == told
    assert set(told) == {"first", "more"}


def many_files(stage: Stage) -> str:
    """Save more chunks than one process encodes alone; return their glob."""
    for number in range(2 * FEW_CHUNKS):
        save_rows(stage.folder / f"part{number:02d}.jsonl", [*rows(5, start=5 * number), "{broken"])
    return str(stage.folder / "part*.jsonl")


def digests(stage: Stage) -> dict[str, str]:
    """The digests of what the stage wrote, provenance aside."""
    return {path.name: file_sha256(path) for path in stage.output.glob("*.[nj]*[yl]")}


def test_any_number_of_processes_writes_the_same_bytes(stage: Stage) -> None:
    settings = {"train": many_files(stage), "max_rejected_share": 0.5}
    written = []
    for processes in (1, 3):
        stage.processes = processes
        stage.run(**settings)
        written.append(digests(stage))
    assert len(written[0]) == len(ARRAYS) + 2
    assert written[0] == written[1]


def test_killed_run_goes_on_without_encoding_finished_shards_again(stage: Stage) -> None:
    settings = {"train": many_files(stage), "max_rejected_share": 0.5}
    stage.run(**settings)
    undisturbed = digests(stage)
    shutil.rmtree(stage.output)

    stage.processes = 2
    work = stage.folder / f".{stage.output.name}.work"
    killed = subprocess.Popen(command_line(stage, **settings), stderr=subprocess.DEVNULL)
    while len(list(work.glob("*/*.facts.json"))) < FEW_CHUNKS and killed.poll() is None:
        time.sleep(0.001)
    workers = children(killed.pid)
    killed.kill()
    killed.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers))  # no orphan goes on writing
    finished = {path: path.stat().st_mtime_ns for path in work.glob("*/*.facts.json")}
    assert finished
    assert not stage.output.exists()

    again = resumed_times(stage, settings, finished)
    assert again == finished
    assert digests(stage) == undisturbed
    assert not work.exists()


def resumed_times(
    stage: Stage, settings: dict[str, Any], finished: dict[Path, int]
) -> dict[Path, int]:
    """Run to the end; return when the shards in `finished` were last written, seen before they go."""
    seen: dict[Path, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "workflow.scripts.tokenize_dataset.make_splits",
            lambda *args, **kwargs: (
                seen.update({path: path.stat().st_mtime_ns for path in finished})
                or make_splits(*args, **kwargs)
            ),
        )
        stage.run(**settings)
    return seen


def test_parts_of_other_data_are_not_taken_up(stage: Stage) -> None:
    stale = stage.folder / f".{stage.output.name}.work" / "0123456789ab"
    stale.mkdir(parents=True)
    (stale / "train-00000-0000000.facts.json").write_text("{}")
    assert len(documents_of(stage.run())) == NUM_TRAIN


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopped_run_leaves_no_process_behind(stage: Stage, stop: signal.Signals) -> None:
    stage.processes = 2
    settings = {"train": many_files(stage), "max_rejected_share": 0.5}
    run = subprocess.Popen(command_line(stage, **settings), stderr=subprocess.DEVNULL)
    wait_until(lambda: len(children(run.pid)) >= 3 or run.poll() is not None)
    family = children(run.pid)
    run.send_signal(stop)
    assert run.wait(60) != 0 or not family
    wait_until(lambda: not any(alive(pid) for pid in family))


def children(pid: int) -> list[int]:
    """All processes below `pid`, by /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            parents[int(path.parent.name)] = int(text.rsplit(")", 1)[1].split()[1])
    found = [pid]
    for number in found:
        found += [child for child, parent in parents.items() if parent == number]
    return found[1:]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def command_line(stage: Stage, **settings: Any) -> list[str]:
    module = [sys.executable, "-m", "workflow.scripts.tokenize_dataset"]
    options = ["--config", json.dumps(stage.config(**settings)), *stage.options()]
    return [*module, *options, "--log", str(stage.folder / "log" / "tokenize.log")]


def command(stage: Stage, **settings: Any) -> subprocess.CompletedProcess[str]:
    line = command_line(stage, **settings)
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_command_logs_the_derived_facts(stage: Stage) -> None:
    done = command(stage)
    assert done.returncode == 0, done.stderr
    log = (stage.folder / "log" / "tokenize.log").read_text()
    assert f"train: {NUM_TRAIN} rows read, {NUM_TRAIN} kept, 0 dropped" in log
    assert f"packed {NUM_TRAIN} documents into" in log


def test_command_shows_a_mistake_without_traceback(stage: Stage) -> None:
    save_rows(stage.train, ["{broken"])
    done = command(stage)
    assert done.returncode == 1
    assert "data.max_rejected_share" in done.stderr
    assert "Traceback" not in done.stderr
