"""Linears in GPTQ, AWQ and compressed-tensors are read as their packages and a plain loop do."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig, LlamaForCausalLM

from tests.support.models import quantized, stock_base
from tests.support.packed_checkpoints import compressed_checkpoint, integer_checkpoint
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.system.errors import UserError

LINEAR = "model.layers.1.mlp.down_proj"
SCHEMES = ("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16")


def code(packed: torch.Tensor, row: int, column: int, *, bits: int) -> int:
    """Return the code of a column of int32 words, the first lowest."""
    word, place = divmod(column, 32 // bits)
    return int((int(packed[row, word]) >> (bits * place)) % 2**bits)


@pytest.mark.parametrize(
    ("bits", "version", "less"), [(4, "gptq", 1), (8, "gptq", 1), (4, "gptq_v2", 0), (2, "gptq", 1)]
)
def test_gptq_is_code_less_zero_times_the_scale_of_the_inputs_group(
    tmp_path: Path, bits: int, version: str, less: int
) -> None:
    folder = integer_checkpoint(tmp_path, "gptq", bits=bits, said={"checkpoint_format": version})
    stored = load_file(folder / "model.safetensors")
    parts = (stored[f"{LINEAR}.{name}"] for name in ("qweight", "qzeros", "scales", "g_idx"))
    packed, zeros, scales, groups = parts
    zeros = zeros + less * sum(1 << shift for shift in range(0, 32, bits))
    with Checkpoint(folder).decoded() as reader:
        found = reader.tensor(f"{LINEAR}.weight")
        assert reader.shape(f"{LINEAR}.weight") == tuple(found.shape) == (80, 176)
    for out, column in ((0, 0), (79, 175), (33, 64), (7, 101)):
        group = int(groups[column])
        zero = code(zeros, group, out, bits=bits)
        expected = (code(packed.T, out, column, bits=bits) - zero) * scales[group, out].float()
        assert found[out, column] == expected.to(torch.bfloat16)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_zeros_of_0_borrow_from_the_next_code_of_their_word(tmp_path: Path, bits: int) -> None:
    """As GPTQModel writes format `gptq`: the words of `gptq_v2` minus 1 for each code."""
    folder = integer_checkpoint(tmp_path, "gptq", bits=bits, said={"checkpoint_format": "gptq_v2"})
    with Checkpoint(folder).decoded() as reader:
        expected = reader.tensor(f"{LINEAR}.weight")
    stored = load_file(folder / "model.safetensors")
    ones = sum(1 << shift for shift in range(0, 32, bits))
    less = {name: x - ones for name, x in stored.items() if name.endswith("qzeros")}
    save_file(stored | less, folder / "model.safetensors")
    text = (folder / "config.json").read_text().replace("gptq_v2", "gptq")
    (folder / "config.json").write_text(text)
    with Checkpoint(folder).decoded() as reader:
        assert torch.equal(reader.tensor(f"{LINEAR}.weight"), expected)


def test_awq_has_its_columns_in_the_order_of_its_kernels(tmp_path: Path) -> None:
    folder = integer_checkpoint(tmp_path, "awq", said={"version": "gemm"})
    stored = load_file(folder / "model.safetensors")
    packed, zeros, scales = (stored[f"{LINEAR}.{x}"] for x in ("qweight", "qzeros", "scales"))
    place = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}
    with Checkpoint(folder).decoded() as reader:
        found = reader.tensor(f"{LINEAR}.weight")
    for out, column in ((0, 0), (79, 175), (33, 64), (7, 101)):
        stored_at = out // 8 * 8 + place[out % 8]
        zero = code(zeros, column // 16, stored_at, bits=4)
        factor = scales[column // 16, out].float()
        expected = (code(packed, column, stored_at, bits=4) - zero) * factor
        assert found[out, column] == expected.to(torch.bfloat16)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_are_what_stock_transformers_decodes(
    tmp_path: Path, scheme: str
) -> None:
    folder = compressed_checkpoint(tmp_path, scheme)
    decoding = CompressedTensorsConfig(run_compressed=False)
    stock = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=decoding, dtype=torch.bfloat16
    )
    beside = ("scale", "weight_shape")
    named = stock.named_parameters()
    expected = {name: p for name, p in named if not any(word in name for word in beside)}
    with Checkpoint(folder).decoded() as reader:
        assert {*reader.names()} == {x for x in expected if "zero_point" not in x}
        for name in reader.names():
            assert reader.shape(name) == tuple(expected[name].shape), name
            assert torch.equal(reader.tensor(name), expected[name].bfloat16()), name


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_original_is_described_quantized_and_loaded_as_it_is_decoded(
    tmp_path: Path, method: str
) -> None:
    folder = tmp_path / "packed"
    if method == "compressed-tensors":
        compressed_checkpoint(folder, "W4A16")
    else:
        integer_checkpoint(folder, method)
    assert describe_checkpoint(Checkpoint.open(folder)).source_dtype == "BF16"
    stock = stock_base(folder, dtype=torch.bfloat16, attention="eager")
    with Checkpoint(folder).decoded() as reader:
        for name, param in stock.named_parameters():
            assert torch.equal(param, reader.tensor(name)), name
    with (
        Checkpoint(quantized(folder, tmp_path / "nf4")).decoded() as base,
        Checkpoint(folder).decoded() as own,
    ):
        weight = f"{LINEAR}.weight"
        assert base.nf4_state(weight) is not None
        error = (base.tensor(weight).float() - own.tensor(weight).float()).norm()
        assert error < 0.15 * own.tensor(weight).float().norm()


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("gptq", {"bits": 3}, "bits = 3"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ("gptq", {"format": "MARLIN"}, "checkpoint_format = 'marlin'"),
        ("awq", {"version": "GEMV"}, "version = 'gemv'"),
        ("awq", {"format": "gemv"}, "version = 'gemv'"),
    ],
)
def test_form_that_is_not_decoded_is_refused_by_name(tmp_path, method, settings, words):
    folder = integer_checkpoint(tmp_path, method, said=settings)
    with pytest.raises(UserError, match=words):
        describe_checkpoint(Checkpoint.open(folder))


def test_format_of_a_group_that_is_not_decoded_is_refused_by_name(tmp_path):
    folder = compressed_checkpoint(tmp_path, "W4A16")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"pack-quantized"', '"marlin-24"', 1))
    with pytest.raises(UserError, match=r"group_0\.format = 'marlin-24'"):
        describe_checkpoint(Checkpoint.open(folder))


def test_gptq_of_the_second_version_is_known_by_either_name(tmp_path):
    folder = integer_checkpoint(tmp_path, "gptq", said={"checkpoint_format": "gptq_v2"})
    name = f"{LINEAR}.weight"
    with Checkpoint(folder).decoded() as reader:
        expected = reader.tensor(name)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("checkpoint_format", "format"))
    with Checkpoint(folder).decoded() as reader:
        assert torch.equal(reader.tensor(name), expected)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("qzeros", None, "down_proj.qzeros is missing"),
        ("qweight", lambda x: x[: len(x) * 3 // 4], "down_proj.qweight has 2.91 bits a weight"),
    ],
)
def test_module_that_cannot_be_decoded_is_named(tmp_path, part, change, words):
    """A module of its own number of bits, as GPTQModel's `dynamic` makes them, too."""
    folder = integer_checkpoint(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    found = tensors.pop(f"{LINEAR}.{part}")
    if change is not None:
        tensors[f"{LINEAR}.{part}"] = change(found).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=words), Checkpoint(folder).decoded() as reader:
        reader.tensor(f"{LINEAR}.weight")
