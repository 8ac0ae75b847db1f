"""Merged models in 4 bits: every reader has the same weights, near those of 16 bits."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from tests.support.mixtures import tiny_mixture
from tests.support.models import tiny_llama
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.conversions import FORMAT, check_w4a16, convert, group_scales
from workflow.lib.export.stock_models import load_base, load_stock
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json

CPU = torch.device("cpu")
IDS = torch.arange(7, 40)[None]
EXPERTS = dict.fromkeys(
    ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64
)


def in_4_bits(source, folder):
    folder.mkdir()
    check_w4a16(Checkpoint(source))
    convert("w4a16", Checkpoint(source), folder, shard_bytes=2**16, device=CPU)
    return folder


@pytest.fixture
def dense(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2}
    source = tiny_llama(tmp_path / "model", dtype=torch.bfloat16, **sizes)
    return in_4_bits(source, tmp_path / "packed")


def test_a_scale_times_a_code_is_exact_in_bfloat16(dense):
    """So readers have the same weights, whatever they compute in."""
    config = read_json(dense / "config.json")["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(FORMAT)
    tensors = {k: t for file in dense.glob("*.safetensors") for k, t in load_file(file).items()}
    with Checkpoint(dense).decoded() as reader:
        for name in reader.packed:
            path = name.removesuffix("weight")
            parts = {k.removeprefix(path): t for k, t in tensors.items() if k.startswith(path)}
            parts["weight_scale"] = parts["weight_scale"].float()
            exact = compressor.decompress(parts, scheme)["weight"]
            assert exact.dtype == torch.float32
            assert torch.equal(exact, reader.tensor(name).float())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stock_transformers_reads_a_mixture_as_the_evaluation_does(family, dtype, tmp_path):
    source = tiny_mixture(family, tmp_path / "model", dtype=torch.bfloat16, **EXPERTS)
    folder = in_4_bits(source, tmp_path / "packed")
    options = {"device": CPU, "compute_dtype": dtype, "attention": "eager"}
    plain, own, stock = (
        load(Checkpoint(path), **options)(input_ids=IDS).logits.detach()
        for load, path in ((load_base, source), (load_base, folder), (load_stock, folder))
    )
    assert torch.equal(own, stock)
    assert not torch.equal(own, plain)
    with Checkpoint(folder).decoded() as reader:
        packed = {name for name in reader.packed if ".experts." in name}
        assert packed
        assert not any("gate.weight" in name or "lm_head" in name for name in reader.packed)


def test_weights_that_a_scale_and_codes_have_are_kept_exactly():
    codes = torch.arange(-8, 8).float().repeat(2)
    weight = torch.stack([codes * 0.34375, codes * 2.0**-9, torch.zeros(32)])
    assert torch.equal(group_scales(weight, 32)[:, 0] * 16, torch.tensor([5.5, 2.0**-5, 16.0]))


def test_scales_are_no_worse_than_those_of_the_largest_weight():
    weight = torch.distributions.StudentT(4.0).sample((64, 128))

    def error(scales):
        return ((weight / scales).round().clamp(-8, 7) * scales - weight).square().sum()

    largest = weight.abs().amax(1, keepdim=True) / 7.5
    assert error(group_scales(weight, 128)) < 0.9 * error(largest)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt_oss", {}, r"experts\.down_proj does not lie in the model's files by itself"),
        ("mixtral", {"intermediate_size": 48}, r"experts\.0\.w2 has 48 inputs"),
    ],
)
def test_model_that_cannot_be_packed_is_refused(family, changes, words, tmp_path):
    with pytest.raises(UserError, match=rf"export\.w4a16: .*{words}.* Leave out export\.w4a16"):
        check_w4a16(Checkpoint(tiny_mixture(family, tmp_path / "model", **changes)))
