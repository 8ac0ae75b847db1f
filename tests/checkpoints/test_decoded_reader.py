"""Packed checkpoints are read as Transformers decodes them, and as a plain loop does."""

import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.mixtures import tiny_mixture
from tests.support.models import quantized, stock_base, stored_tensors
from tests.support.packed_checkpoints import fp8_checkpoint, mxfp4_checkpoint
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import expert_stacks
from workflow.lib.model.describe_model import describe_checkpoint
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json

E2M1 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}
WHOLE_BLOCKS, CUT_BLOCKS = (16, 8), (32, 48)
FORMATS = {"fp8": partial(fp8_checkpoint, block_size=WHOLE_BLOCKS), "mxfp4": mxfp4_checkpoint}


def meta(folder):
    return Checkpoint(folder).build(torch.bfloat16)


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_tensors_are_those_that_transformers_decodes(tmp_path, write):
    folder = write(tmp_path)
    stock = stock_base(folder, dtype=torch.bfloat16, attention="eager")
    with Checkpoint(folder).weights() as reader:
        assert {*reader.names()} == {name for name, _ in stock.named_parameters()}
        for name, param in stock.named_parameters():
            assert reader.shape(name) == tuple(param.shape), name
            assert reader.dtype(name) == "BF16", name
            assert torch.equal(reader.tensor(name), param), name
            assert torch.equal(reader.rows(name, 1, 3), param[1:3]), name
        for name in expert_stacks(meta(folder)):
            experts = torch.stack([*reader.experts(name)])
            assert torch.equal(experts, stock.get_parameter(name)), name


@pytest.mark.parametrize("block_size", [WHOLE_BLOCKS, CUT_BLOCKS], ids=str)
def test_fp8_is_the_product_of_code_and_scale_of_its_block(tmp_path, block_size):
    """Blocks may be cut at the end; of such weights Transformers takes smaller blocks, or fails."""
    folder = fp8_checkpoint(tmp_path, block_size=block_size)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.10.gate_proj.weight"
    codes, scales = stored[name].float(), stored[f"{name}_scale_inv"]
    expected = torch.empty(48, 64)
    for row in range(48):
        for column in range(64):
            scale = scales[row // block_size[0], column // block_size[1]]
            expected[row, column] = codes[row, column] * scale
    with Checkpoint(folder).decoded() as reader:
        assert torch.equal(reader.tensor(name), expected.to(torch.bfloat16))
        assert torch.equal(reader.rows(name, 33, 41), expected[33:41].to(torch.bfloat16))
        assert f"{name}_scale_inv" not in reader


def test_mxfp4_is_a_small_value_times_a_power_of_two(tmp_path):
    folder = mxfp4_checkpoint(tmp_path)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    with Checkpoint(folder).decoded() as reader:
        found = reader.rows(name, 2, 3)[0]
        assert found.shape == (96, 64)
        for out in (0, 17, 63):
            for column in range(96):
                block, within = divmod(column, 32)
                byte = int(blocks[2, out, block, within // 2])
                code = byte >> 4 if within % 2 else byte & 15
                value = (-1 if code & 8 else 1) * E2M1[code & 7]
                assert found[column, out] == value * 2.0 ** (int(scales[2, out, block]) - 127)


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_base_of_a_packed_checkpoint_is_that_of_the_decoded_one(tmp_path, write):
    folder = write(tmp_path / "packed")
    plain = tiny_mixture({"fp8": "qwen3_moe", "mxfp4": "gpt_oss"}[_method(folder)], tmp_path / "p")
    with Checkpoint(folder).decoded() as reader:
        decoded = {name: reader.tensor(name).contiguous() for name in reader.names()}
    save_file(decoded, plain / "model.safetensors", metadata={"format": "pt"})
    bases = [quantized(source, tmp_path / f"{source.name}-nf4") for source in (folder, plain)]
    found, expected = map(stored_tensors, bases)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    method = read_json(bases[0] / "config.json")["quantization_config"]["quant_method"]
    assert method == "bitsandbytes"


def _method(folder):
    return str(read_json(folder / "config.json")["quantization_config"]["quant_method"])


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_packed_checkpoint_is_described_as_the_decoded_one(tmp_path, write):
    shape = describe_checkpoint(Checkpoint.open(write(tmp_path)))
    assert shape.source_dtype == "BF16"
    assert shape.layer(1).top_k == 2


def test_fp8_without_its_scales_is_refused(tmp_path):
    folder = fp8_checkpoint(tmp_path, block_size=WHOLE_BLOCKS)
    stored = load_file(folder / "model.safetensors")
    left = {name: tensor for name, tensor in stored.items() if not name.endswith("_scale_inv")}
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="is stored as F8_E4M3, which is neither bf16"):
        describe_checkpoint(Checkpoint.open(folder))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_no_finite_number_is_named_by_tensor_and_place(tmp_path, value):
    folder = fp8_checkpoint(tmp_path, block_size=WHOLE_BLOCKS)
    tensors = load_file(folder / "model.safetensors")
    norm, packed = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
    tensors[norm][3] = tensors[norm][9] = value
    tensors[f"{packed}_scale_inv"][2, 1] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(folder).weights() as reader:
        assert not reader.tensor(norm).isfinite().all(), "elsewhere the bytes are read as they are"
    with Checkpoint(folder).weights(finite=True) as reader:
        with pytest.raises(UserError, match=rf"safetensors: {norm}\[3\] is {value} \(2 of 64 "):
            reader.tensor(norm)
        for read in (reader.tensor, lambda name: reader.rows(name, 20, 48)):
            with pytest.raises(UserError, match=rf"{packed}\[32, 8\] is -?(nan|inf)"):
                read(packed)
