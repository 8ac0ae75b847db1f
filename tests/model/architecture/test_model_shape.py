"""Shape facts from config.json and safetensors headers, and the mistakes that they show."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.mixtures import MIXTURES, tiny_mixture
from tests.support.preflight_examples import TINY, tensor_shapes, write_checkpoint
from workflow.lib.checkpoints.checkpoint import Checkpoint, loaded_tensors
from workflow.lib.checkpoints.files import config_file, safetensors_headers
from workflow.lib.checkpoints.files.safetensors_headers import read_headers
from workflow.lib.model.architecture.model_shape import shape_of_document
from workflow.lib.model.describe_model import describe_checkpoint, describe_config
from workflow.lib.system.errors import UserError


def reject(folder, *parts):
    with pytest.raises(UserError) as caught:
        describe_checkpoint(Checkpoint.open(folder))
    for part in parts:
        assert part in str(caught.value)


def with_config(folder, **changes):
    """Write the tiny checkpoint with other settings in its config.json; a value of ... removes the
    key."""
    config = {k: v for k, v in (TINY | changes).items() if v is not ...}
    return write_checkpoint(folder, config=config)


def with_shapes(folder, changes):
    """Write the tiny checkpoint with other tensors; None removes one."""
    model_shape = {k: v for k, v in (tensor_shapes(TINY) | changes).items() if v is not None}
    return write_checkpoint(folder, shapes=model_shape)


def test_parameters_are_counted_as_in_the_file(tmp_path):
    shape = describe_checkpoint(Checkpoint.open(write_checkpoint(tmp_path)))
    stored = sum(int(np.prod(s)) for s in tensor_shapes(TINY).values())
    assert shape.quantized_weights + shape.plain_weights == stored


def test_linears_have_names_and_shapes(tmp_path):
    shape = describe_checkpoint(Checkpoint.open(write_checkpoint(tmp_path)))
    sizes = {x.name: (x.out_features, x.in_features) for x in shape.kinds[0].linears}
    assert sizes == {
        "q_proj": (30, 30),
        "k_proj": (10, 30),
        "v_proj": (10, 30),
        "o_proj": (30, 30),
        "gate_proj": (46, 30),
        "up_proj": (46, 30),
        "down_proj": (30, 46),
    }


def test_biases_follow_from_the_switches_of_config():
    switches = {"attention_bias": True, "mlp_bias": True}
    plain, biased = (describe_config(TINY | more, origin=Path("x")) for more in ({}, switches))
    biases = 30 + 2 * 10 + 30 + 2 * 46 + 30
    assert biased.plain_weights - plain.plain_weights == 3 * biases


def test_description_is_read_as_it_was_written():
    shape = describe_config(TINY, origin=Path("x"))
    assert shape_of_document(json.loads(json.dumps(shape.document()))) == shape


def test_shards_are_read_through_their_index(tmp_path):
    write_checkpoint(tmp_path)
    whole = read_headers([tmp_path / "model.safetensors"])
    names = sorted(whole)
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        tensors = {n: np.zeros(whole[n].shape, np.float16) for n in names if files[n] == file}
        save_file(tensors, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {n: t.shape for n, t in loaded_tensors(tmp_path).items()} == {
        n: t.shape for n, t in whole.items()
    }


def test_stored_rotary_tables_do_not_count(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": (5,)}
    found = describe_checkpoint(Checkpoint.open(with_shapes(tmp_path, extra)))
    plain = describe_checkpoint(Checkpoint.open(with_shapes(tmp_path / "plain", {})))
    assert found == replace(plain, left_tensors=1)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_counted_however_they_are_published(tmp_path, family):
    folder = tiny_mixture(family, tmp_path)
    found = describe_checkpoint(Checkpoint.open(folder))
    assert found.source_dtype == "F32"
    assert found.layer(1).top_k == 2
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if ".layers.1." in name and ".experts." in name)
    save_file({k: t for k, t in tensors.items() if k != lost}, folder / "model.safetensors")
    reject(folder, "model.layers.1.", "check model.source")


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("intermediate_size", ..., "intermediate_size = None"),
        ("vocab_size", "many", "vocab_size = 'many'"),
        ("num_hidden_layers", 10**9, "num_hidden_layers = 1000000000: must be at most 10,000"),
        ("num_hidden_layers", 10**4000, f"num_hidden_layers = 1{'0' * 19}...: must be at most"),
        ("num_hidden_layers", float("inf"), "num_hidden_layers = inf: must be at most 10,000"),
        ("vocab_size", 10**12, "vocab_size = 1000000000000: must be at most 16,777,216"),
        ("text_config", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be"),
        ("num_attention_heads", 31, "num_attention_heads = 31: must be at most hidden_size = 30"),
    ],
)
def test_size_that_no_model_has_is_refused(tmp_path, key, value, bound):
    reject(with_config(tmp_path, **{key: value}), f"config.json: {bound}", "model.source")


def test_config_too_large_to_be_one_is_not_read(tmp_path, monkeypatch):
    write_checkpoint(tmp_path)
    monkeypatch.setattr(config_file, "MAX_CONFIG_BYTES", 20)
    reject(tmp_path, "config.json: it has", "at most 20 are read")


NO_MODEL: dict[str, tuple[str, bytes | None, tuple[str, ...]]] = {
    "page": ("config.json", b"<html>not found</html>", ("cannot be read as JSON", "model.source")),
    "no weights": ("model.safetensors", None, ("no weights, neither model.safetensors nor",)),
}


@pytest.mark.parametrize(("file", "content", "said"), NO_MODEL.values(), ids=NO_MODEL)
def test_folder_without_a_model_is_refused(tmp_path, file, content, said):
    path = write_checkpoint(tmp_path) / file
    path.unlink() if content is None else path.write_bytes(content)
    reject(tmp_path, file, *said)


def test_packed_tensors_ask_for_the_original(tmp_path):
    folder = write_checkpoint(tmp_path, dtype=np.uint8)
    reject(folder, "stored as U8", "original bf16, fp16 or fp32 checkpoint")


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("2.mlp.up_proj.weight", (47, 30), "model.layers.2.mlp.up_proj.weight has shape [47, 30]"),
        ("1.self_attn.o_proj.weight", None, "no tensor model.layers.1.self_attn.o_proj.weight"),
    ],
)
def test_tensor_that_disagrees_with_config_is_named(tmp_path, name, shape, said):
    reject(with_shapes(tmp_path, {f"model.layers.{name}": shape}), said)


def test_more_layers_than_config_says(tmp_path):
    folder = with_config(tmp_path, num_hidden_layers=2)
    reject(folder, "decoder layer 2", "num_hidden_layers = 2")


def header_of(**entry):
    header = json.dumps({"x": {"data_offsets": [0, 8]} | entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: whole[:-7], "not a whole safetensors file"),
        (lambda _: b"\x89PNG\r\n\x1a\n" + bytes(1000), "not a safetensors file, whatever its name"),
        (
            lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
            "Git LFS pointer",
        ),
        (lambda _: header_of(dtype="F16", shape=[3]), "a tensor of shape (3,) F16 in 8 bytes"),
        (
            lambda _: header_of(dtype="U8", shape=[2] * 10**6),
            "a tensor of 1000000 dimensions, at most 8 are",
        ),
    ],
    ids=["truncated", "picture", "pointer", "offsets", "dimensions"],
)
def test_file_that_is_no_whole_safetensors_file_is_refused(tmp_path, content, said):
    path = write_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))
    reject(tmp_path, said)


@pytest.mark.parametrize("number", ["9" * 5000, "²"])
def test_name_at_which_transformers_fails_is_refused(tmp_path, number):
    """It sorts names by their numbers, and takes for one what Python does not."""
    folder = with_shapes(tmp_path, {f"model.layers.{number}.mlp.bias": (5,)})
    reject(folder, "Transformers", "cannot load the checkpoint", "check model.source")


INDICES: dict[str, tuple[str, int, str]] = {
    "large": ("a", 20, "is no index of a checkpoint (ValueError('it is larger than"),
    "another tensor": ("ghost", 10**6, "holds 'ghost', but it does not"),
}


@pytest.mark.parametrize(("tensor", "most", "said"), INDICES.values(), ids=INDICES)
def test_index_of_other_files_is_refused(tmp_path, monkeypatch, tensor, most, said):
    path = write_checkpoint(tmp_path) / "model.safetensors"
    path.rename(tmp_path / "all.safetensors")
    index = {"metadata": {}, "weight_map": {tensor: "all.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(safetensors_headers, "MAX_HEADER_BYTES", most)
    reject(tmp_path, said)
