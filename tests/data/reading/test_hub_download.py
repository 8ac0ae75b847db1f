"""Choice of files, the partial folder, and error messages; whole downloads are in
test_download_source.py."""

import errno
import json
from pathlib import Path

import pytest

from workflow.lib.data.reading.hub_download import (
    Source,
    check_paths,
    choose_files,
    explain,
    partial_folder,
    publish,
    weight_shards,
)
from workflow.lib.system.errors import UserError

MODEL = Source("owner/name", None, "model")


def chosen(source, *paths):
    """Return the names of the files chosen among `paths`, which need no download to tell."""
    return sorted(choose_files(source, paths, commit="c" * 40, folder=Path("unused")))


def dataset(*files):
    return Source("owner/data", None, "dataset", files)


def test_every_kind_of_tokenizer_file_is_chosen():
    paths = ["config.json", "model.safetensors", "merges.txt", "qwen.tiktoken", "tokenizer.model"]
    extra = ["additional_chat_templates/tool.jinja", "preprocessor_config.json", "vocab.json"]
    assert chosen(MODEL, *paths, *extra) == sorted(paths + extra)


@pytest.mark.parametrize(
    "paths",
    [
        ["adapter_config.json", "adapter_model.safetensors"],
        ["config.json", "model.safetensors", "tokenizer.json"],
    ],
)
def test_scored_repository_is_an_adapter_or_a_model(paths):
    assert chosen(Source("owner/teacher", None, "scored"), *paths, "README.md") == paths


@pytest.mark.parametrize(
    ("source", "paths", "missing"),
    [
        (MODEL, ["model.safetensors", "tokenizer.json"], "no config.json;"),
        (MODEL, ["config.json", "model.safetensors"], "no tokenizer;"),
        (MODEL, ["adapter_config.json", "adapter_model.safetensors"], "it is an adapter"),
        (MODEL, ["config.json", "tokenizer.json", "a.gguf"], r"only a\.gguf \(GGUF files\)"),
        (MODEL, ["config.json", "model.safetensors", "tekken.json"], r"tokenizer is tekken\.json"),
        (MODEL, [], "it has no files"),
        (MODEL, map("f{}".format, range(101)), r"has f0, f1, f10, f100, f11, f12, .* and 93 more"),
        (dataset("train.jsonl"), ["zzz.csv"], r"no such file; it has zzz\.csv\."),
        (dataset("source.json"), ["source.json"], r"source\.json is the name of this workflow's"),
    ],
)
def test_incomplete_repository_is_refused_by_what_it_lacks(source, paths, missing):
    with pytest.raises(UserError, match=missing):
        chosen(source, *paths)


@pytest.mark.parametrize(
    "path", ["../evil.safetensors", "/etc/evil", "a//b", "a\\..\\b", "\x1b[2J.json"]
)
def test_path_that_leaves_the_folder_or_speaks_to_the_terminal_is_refused(path):
    check_paths(MODEL, ["config.json", "a/b.json"])
    with pytest.raises(UserError) as error:
        check_paths(MODEL, ["config.json", path])
    assert f"lists the unsafe path {path!r}" in str(error.value)


def test_dataset_file_is_taken_literally_and_a_pattern_within_one_folder():
    assert chosen(dataset("a[1]*.jsonl"), "a[1]*.jsonl", "a1b.jsonl") == ["a[1]*.jsonl"]
    assert chosen(dataset("*.jsonl"), "a.jsonl", "b/c.jsonl") == ["a.jsonl"]


@pytest.mark.parametrize("shard", ["missing.safetensors", "../outside.safetensors", "config.json"])
def test_index_that_names_no_safetensors_file_of_the_repository_is_refused(tmp_path, shard):
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard, "b": "good.safetensors"}}))
    with pytest.raises(UserError, match="no safetensors file of this repository"):
        weight_shards(MODEL, index, listed=["good.safetensors", "config.json"])


@pytest.mark.parametrize("text", ["<html>", "[]", "{}", '{"weight_map": 1}', "[" * 100_000])
def test_index_that_is_none_is_one_message(tmp_path, text):
    index = tmp_path / "index.json"
    index.write_text(text)
    with pytest.raises(UserError, match=r"model\.source = .* is no index of a checkpoint"):
        weight_shards(MODEL, index, listed=[])


def test_publishing_leaves_exactly_the_kept_files(tmp_path):
    partial = partial_folder(tmp_path / "out")
    for name in ("kept.txt", "deep/er/kept.txt", "old/er/file", "stale.txt"):
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text(name)
    publish(partial, tmp_path / "out", keep=["kept.txt", "deep/er/kept.txt"])
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {"out", "out/kept.txt", "out/deep", "out/deep/er", "out/deep/er/kept.txt"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_says_free_space_and_repeat(number):
    assert str(explain(MODEL, OSError(number, "full"))) == (
        "model.source = 'owner/name': the disk, or your quota on it, is full. "
        "Free space and repeat the command: finished files are kept."
    )
