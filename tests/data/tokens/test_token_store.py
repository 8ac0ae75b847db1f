"""The tokens folder: what is written is read back, and damage is found on opening."""

import errno
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from workflow.lib.data.tokens.packing import Packing
from workflow.lib.data.tokens.token_store import (
    ARRAYS,
    DESIRABLE,
    FORMAT_VERSION,
    WEIGHTS,
    TokenStore,
    map_array,
    optional_files,
    recorded_arrays,
)
from workflow.lib.data.tokens.token_writer import Window, write_heldout, write_train
from workflow.lib.system.checksums import findings
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256, write_checked_json

SEQ_LEN = 7
ADVANTAGES = optional_files("advantages")
PAD = 9


def document(*ids, trained):
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[len(ids) - trained :] = True
    return np.array(ids, dtype=np.uint32), mask


TRAIN = [
    document(10, 11, 12, trained=1),
    document(20, 21, trained=1),
    document(30, 31, 32, 33, 34, trained=4),
]
RATED = [*TRAIN[:2], document(60, 61, 62, trained=1), document(70, 71, 72, 73, trained=2)]
HELDOUT = [document(40, 41, trained=1), document(50, 51, 52, trained=2)]
# Row 0 holds documents 2 and 1 and is full; row 1 holds document 0 and four places of padding.
PACKING = Packing(documents=np.array([2, 1, 0]), offsets=np.array([0, 2, 3]))


def window(documents, packing):
    lengths = np.array([len(ids) for ids, _ in documents])
    return Window(
        ids=np.concatenate([ids for ids, _ in documents]),
        mask=np.concatenate([mask for _, mask in documents]),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        packing=packing,
    )


@pytest.fixture
def folder(tmp_path):
    write_train(tmp_path, [window(TRAIN, PACKING)], seq_len=SEQ_LEN, pad_token_id=PAD)
    write_heldout(tmp_path, [(ids, mask, np.array([len(ids)])) for ids, mask in HELDOUT])
    save_manifest(tmp_path)
    return tmp_path


@pytest.fixture
def rated(tmp_path):
    """A folder of rated answers. Row 0 holds a good one, documents 0 and 1; row 1 a bad one."""
    good = np.repeat([True, False], [5, 7])
    (lengths,) = [np.array([len(ids) for ids, _ in RATED])]
    ids, mask = (np.concatenate(parts) for parts in zip(*RATED, strict=True))
    packing = Packing(documents=np.arange(4), offsets=np.array([0, 2, 4]))
    some = Window(ids, mask, np.cumsum(lengths) - lengths, lengths, packing, {DESIRABLE[0]: good})
    write_train(tmp_path, [some], seq_len=SEQ_LEN, pad_token_id=PAD, optional=DESIRABLE[:1])
    write_heldout(tmp_path, [(ids, mask, good, lengths)], optional=DESIRABLE[1:])
    counts = {"train": {"packed_rows": 2}, "heldout": {"tokens": len(ids), "documents": 4}}
    save_manifest(tmp_path, examples="rated", splits=counts, more=DESIRABLE)
    return tmp_path


def save_manifest(folder, *, more=(), **changes):
    manifest = {
        "format_version": FORMAT_VERSION,
        "seq_len": SEQ_LEN,
        "splits": {"train": {"packed_rows": 2}, "heldout": {"tokens": 5, "documents": 2}},
        "files": {name: file_sha256(folder / name) for name in (*ARRAYS, *more)},
    }
    write_checked_json(folder / "manifest.json", manifest | changes)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("input_ids", [[30, 31, 32, 33, 34, 20, 21], [10, 11, 12, PAD, PAD, PAD, PAD]]),
        ("position_ids", [[0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 0, 1, 2, 3]]),
        ("loss_mask", [[0, 1, 1, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0]]),
    ],
)
def test_rows_hold_documents_then_padding_each_from_position_0_which_is_no_target(
    folder, name, rows
):
    assert getattr(TokenStore.open(folder), name).astype(int).tolist() == rows


def test_trained_tokens_are_counted_per_row(folder, monkeypatch):
    monkeypatch.setattr(
        "workflow.lib.data.tokens.token_store.CHUNK_TOKENS", SEQ_LEN
    )  # one row per chunk
    counts = TokenStore.open(folder).trained_tokens_per_row
    assert counts.tolist() == [5, 1]
    assert counts.dtype == np.int32


def test_heldout_documents_come_back_as_written(folder):
    store = TokenStore.open(folder)
    read = [(ids.tolist(), mask.tolist()) for ids, mask in store.heldout_documents()]
    assert read == [(ids.tolist(), mask.tolist()) for ids, mask in HELDOUT]
    assert store.num_heldout_documents == 2


def test_document_whose_first_token_is_a_target_is_refused(tmp_path):
    wrong = [document(1, 2, trained=2)]
    packing = Packing(documents=np.array([0]), offsets=np.array([0, 1]))
    with pytest.raises(AssertionError, match="first token"):
        write_train(tmp_path, [window(wrong, packing)], seq_len=SEQ_LEN, pad_token_id=PAD)


def test_windows_and_blocks_are_written_behind_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "workflow.lib.data.tokens.token_writer.BLOCK_TOKENS", SEQ_LEN
    )  # one row at a time
    windows = [window(TRAIN, PACKING)] * 3
    assert write_train(tmp_path, windows, seq_len=SEQ_LEN, pad_token_id=PAD) == 6
    ids = np.load(tmp_path / "train.input_ids.npy")
    assert (ids[:2] == ids[2:4]).all()
    assert (ids[:2] == ids[4:]).all()
    assert ids[1].tolist() == [10, 11, 12, PAD, PAD, PAD, PAD]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path):
    path.write_bytes(b"")


def retype(path):
    np.save(path, np.load(path).astype(np.int16))


def reshape(path):
    np.save(path, np.load(path)[:1])


def test_machine_without_memory_is_not_told_as_damage(folder, monkeypatch):
    """Who is told so deletes sound tokens."""
    lack = OSError(errno.ENOMEM, "Cannot allocate memory")
    monkeypatch.setattr(np, "memmap", mock.Mock(side_effect=lack))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        TokenStore.open(folder)


@pytest.mark.parametrize("damage", [cut, lengthen, empty, retype, reshape, Path.unlink])
@pytest.mark.parametrize(
    "name", ["train.input_ids.npy", "heldout.loss_mask.npy", "heldout.offsets.npy"]
)
def test_damaged_array_is_named_with_what_to_do(folder, damage, name):
    damage(folder / name)
    with pytest.raises(UserError, match=f"{name} is damaged: it .* Delete the folder"):
        TokenStore.open(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_broken_manifest_is_damage(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json is damaged: it cannot be read"):
        TokenStore.open(folder)


@pytest.mark.parametrize("name", ARRAYS)
def test_changed_token_that_opens_is_found_by_its_checksum(folder, name):
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    recorded = recorded_arrays(folder, TokenStore.open(folder).manifest)
    wrong = [
        file.name for file, finding in zip(recorded, findings(recorded), strict=True) if finding
    ]
    assert wrong == [name]


def test_manifest_without_checksums_is_damage(folder):
    save_manifest(folder, files={})
    with pytest.raises(UserError, match=r"manifest\.json is damaged: it lacks checksums"):
        recorded_arrays(folder, TokenStore.open(folder).manifest)


def test_missing_folder_names_the_stage_that_writes_it(tmp_path):
    with pytest.raises(UserError, match="tokenize_dataset writes it"):
        TokenStore.open(tmp_path / "none")


def test_texts_are_neither_paired_nor_rated(folder):
    store = TokenStore.open(folder)
    assert (store.examples, store.desirable, store.heldout_desirable) == ("texts", None, None)


def test_rated_answers_say_of_each_token_and_heldout_document_whether_they_are_good(rated):
    store = TokenStore.open(rated)
    assert store.examples == "rated"
    assert store.desirable is not None
    assert store.heldout_desirable is not None
    assert store.desirable.astype(int).tolist() == [[1] * 5 + [0] * 2, [0] * SEQ_LEN]
    assert store.heldout_desirable.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version = 2, .* Delete the folder"),
        ({"examples": "ranked"}, "examples = 'ranked', but .* knows texts, pairs, rated"),
        ({"examples": "rated"}, "its examples are rated, and it has no optional array"),
        (
            {"examples": "groups", "more": ADVANTAGES},
            f"its examples are groups, and it has {ADVANTAGES[0]}",
        ),
        (
            {"examples": "pairs", "more": WEIGHTS[:1]},
            f"examples are pairs, and it has {WEIGHTS[0]}",
        ),
        ({"more": (DESIRABLE[1],)}, f"its examples are texts, and it has {DESIRABLE[1]}"),
        (
            {
                "examples": "pairs",
                "splits": {"train": {"packed_rows": 2}, "heldout": {"tokens": 5, "documents": 1}},
            },
            "an odd number of held-out documents, which is none of pairs",
        ),
    ],
)
def test_folder_of_another_format_or_of_other_examples_than_its_manifest_s_is_refused(
    folder, changes, message
):
    for name in changes.get("more", ()):
        np.save(folder / name, np.zeros((2, SEQ_LEN), dtype=np.float32))
    save_manifest(folder, **changes)
    with pytest.raises(UserError, match=message):
        TokenStore.open(folder)


def test_no_flipped_bit_of_a_header_ends_in_another_error(tmp_path):
    path = tmp_path / "heldout.loss_mask.npy"
    np.save(path, np.ones(37, dtype=bool))
    whole = path.read_bytes()
    refused = 0
    for place in range(8 * (len(whole) - 37)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            assert map_array(path, "|b1", (37,)).tolist() == [True] * 37
        except UserError:
            refused += 1
    assert refused > 900
