"""Reading safetensors checkpoints: whole tensors, slices, and what is wrong with broken folders."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from workflow.lib.checkpoints.safetensors_reader import (
    INDEX,
    QUANTIZATION,
    SINGLE,
    CheckpointReader,
)
from workflow.lib.system.errors import UserError

TENSORS = {
    "a.weight": torch.arange(77, dtype=torch.float32).reshape(11, 7),
    "b.weight": torch.arange(5, dtype=torch.uint8),
    "scale": torch.tensor(2.5),
}


def sharded(folder):
    folder.mkdir()
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "one.safetensors")
    save_file({k: TENSORS[k] for k in ("b.weight", "scale")}, folder / "two.safetensors")
    files = {"a.weight": "one.safetensors"} | dict.fromkeys(
        ["b.weight", "scale"], "two.safetensors"
    )
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def single(folder):
    folder.mkdir()
    save_file(TENSORS, folder / SINGLE)
    return folder


@pytest.mark.parametrize("write", [single, sharded])
def test_every_tensor_is_read_whole_from_one_file_or_many(tmp_path, write):
    assert callable(write)
    with CheckpointReader(write(tmp_path / "model")) as reader:
        assert reader.names() == sorted(TENSORS)
        assert "a.weight" in reader
        assert "c.weight" not in reader
        for name, tensor in TENSORS.items():
            assert torch.equal(reader.tensor(name), tensor)
            assert reader.shape(name) == tuple(tensor.shape)
        assert [reader.dtype(name) for name in reader.names()] == ["F32", "U8", "F32"]


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 11), (3, 4), (9, 11), (10, 99), (4, 4), (11, 11), (7, 2)]
)
def test_rows_are_those_of_a_slice(tmp_path, start, stop):
    with CheckpointReader(single(tmp_path / "model")) as reader:
        rows = reader.rows("a.weight", start, stop)
        assert rows.shape[1:] == (7,), "empty slices keep their width"
        assert torch.equal(rows, TENSORS["a.weight"][start:stop])


def refused(folder, *, tensor="a.weight"):
    """Return the message with which reading `tensor` is refused."""
    with pytest.raises(UserError) as caught, CheckpointReader(folder) as reader:
        reader.tensor(tensor)
    return str(caught.value)


def test_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    message = refused(tmp_path)
    assert message.startswith(
        f"{tmp_path} has neither model.safetensors nor model.safetensors.index.json."
    )
    assert "model.source" in message


def test_index_that_names_an_absent_file_is_refused(tmp_path):
    folder = sharded(tmp_path / "model")
    (folder / "two.safetensors").unlink()
    assert refused(folder) == (
        f"{folder / INDEX} names 1 of 2 files that are not beside it: two.safetensors. "
        "Complete the download."
    )


@pytest.mark.parametrize("text", ["{", "[]", "{}", "null"])
def test_broken_index_is_refused(tmp_path, text):
    folder = sharded(tmp_path / "model")
    (folder / INDEX).write_text(text)
    message = refused(folder)
    assert re.match(
        rf"{folder / INDEX} is no index of a checkpoint \(.*Download it again",
        message,
    )


def test_index_of_other_files_is_refused(tmp_path):
    folder = sharded(tmp_path / "model")
    save_file({"scale": TENSORS["scale"]}, folder / "two.safetensors")
    assert refused(folder, tensor="scale") == (
        f"{folder / 'two.safetensors'} lacks 'b.weight', which {INDEX} promises there: "
        "the files do not belong together. Download them again."
    )


BREAKS = {
    "cut short": lambda data: data[:-1],
    "header alone": lambda data: data[:20],
    "empty": lambda data: b"",
    "a page of text": lambda data: b"<!DOCTYPE html>\n<title>Sign in</title>\n" * 9,
    "a pointer to large file storage": lambda data: (
        b"version https://git-lfs.github.com/spec/v1\nsize 9\n"
    ),
}


@pytest.mark.parametrize("damage", BREAKS.values(), ids=BREAKS)
def test_file_that_is_no_whole_safetensors_file_is_refused(tmp_path, damage):
    assert callable(damage)
    path = single(tmp_path / "model") / SINGLE
    path.write_bytes(damage(path.read_bytes()))
    message = refused(path.parent)
    assert message.startswith(f"{path} is not a whole safetensors file (")
    assert message.endswith("Download it again.")
    (path.parent / QUANTIZATION).touch()
    assert refused(path.parent).endswith(f"Delete the folder {path.parent}; it is made again.")


def test_absent_tensor_is_refused_by_name(tmp_path):
    folder = single(tmp_path / "model")
    assert refused(folder, tensor="c.weight") == (
        f"{folder} has no tensor 'c.weight': it is not a checkpoint of this model. "
        "Check model.source, or delete the folder to have it made again."
    )
