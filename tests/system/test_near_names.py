"""Suggestions for misspelt names and paths."""

from pathlib import Path

import pytest

from workflow.lib.system.near_names import did_you_mean, near_names, near_path, near_paths

FOLDERS = ("profiles", "data", "models/my-model", "models/my-model-2.5")
FILES = ("chats.jsonl", "notes.txt", "data/train.jsonl.gz", ".chats.jsonl.lock", "models/card.md")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
    for name in FILES:
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("missing", "meant"),
    [
        ("chat.jsonl", "chats.jsonl"),
        ("Chats.jsonl", "chats.jsonl"),
        ("chats.jsnl", "chats.jsonl"),
        ("chats.json", "chats.jsonl"),
        ("chats", "chats.jsonl"),
        ("data/trian.jsonl.gz", "data/train.jsonl.gz"),
        ("data/train.jsonl", "data/train.jsonl.gz"),
        ("date/train.jsonl.gz", "data/train.jsonl.gz"),
        ("dta", "data"),
    ],
)
def test_a_misspelt_path_is_answered_by_the_one_that_exists(root, missing, meant):
    assert near_path(missing, root=root) == meant
    assert near_path(str(root / missing), root=Path()) == str(root / meant)


@pytest.mark.parametrize(
    "missing",
    [
        "nofile.jsonl",  # profiles/ is a folder
        "lamps.jsonl",  # as long as chats.jsonl, and of its type
        "note.jsonl",  # notes.txt is of another type
        "date/other.jsonl",
        "nowhere/deep/x.jsonl",
        "\0",
    ],
)
def test_nothing_is_suggested_for_a_path_like_no_other_of_its_kind(root, missing):
    assert did_you_mean(missing, root=root) == ""


@pytest.mark.parametrize(
    ("missing", "meant"),
    [("models/my-modle", "models/my-model"), ("models/my-modl-2.5", "models/my-model-2.5")],
)
def test_only_folders_are_suggested_for_a_folder(root, missing, meant):
    assert near_path(missing, root=root, is_folder=True) == meant
    assert near_path("models/crad", root=root, is_folder=True) is None


def test_names_are_suggested_nearest_first_then_those_that_contain_the_misspelt_one():
    keys = ["per_device_batch_size", "batch_size", "batch_sizes", "learning_rate"]
    near = near_names("bacth_size", keys, count=3)
    assert near == ["batch_size", "batch_sizes"]
    assert near_names("batch", keys, count=3) == [
        "batch_size",
        "batch_sizes",
        "per_device_batch_size",
    ]
    assert near_names("xyz", keys) == near_names("rate"[:3], keys) == []


def test_files_of_a_repository_are_suggested_by_their_whole_path():
    files = ["data/train-00000.parquet", "data/test-00000.parquet", "README.md"]
    assert near_paths("data/trian-00000.parquet", files) == ["data/train-00000.parquet"]
