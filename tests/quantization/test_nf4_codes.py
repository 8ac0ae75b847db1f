"""Stacks of experts in an NF4 checkpoint, for families that publish them in different ways."""

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from transformers import AutoModelForCausalLM

from tests.support.mixtures import MIXTURES, tiny_mixture
from tests.support.models import quantized, stored_tensors
from tests.support.refusals import refusal
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.checkpoints.decoder_layers import expert_stacks
from workflow.lib.checkpoints.meta_model import build_config_on_meta
from workflow.lib.model.adaptable_linears import adaptable_linears
from workflow.lib.quantization import nf4_codes
from workflow.lib.quantization.nf4_checkpoint import check_model
from workflow.lib.quantization.nf4_codes import check_blocks, quantize_stack
from workflow.lib.settings.config import QuantizeConfig

CPU = torch.device("cpu")


def stock_stacks(folder):
    """The stacks as Transformers loads them, in the orientation (experts, out, in)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = dict(model.named_parameters())
    return {
        path: params[path].detach().mT if stack.transposed else params[path].detach()
        for path, stack in expert_stacks(model).items()
    }


@pytest.mark.parametrize("settings", [{}, {"double_quant": False, "block_size": 128}], ids=str)
@pytest.mark.parametrize("family", MIXTURES)
def test_stack_has_the_codes_and_scales_of_bitsandbytes_for_the_whole(tmp_path, family, settings):
    config = QuantizeConfig(**settings)
    source = tiny_mixture(family, tmp_path / "model")
    ours = stored_tensors(quantized(source, tmp_path / "nf4", **settings))
    stacks = stock_stacks(source)
    assert len(stacks) in (2, 4)  # the first layer of two is dense, or none
    for path, weights in stacks.items():
        packed, state = quantize_4bit(
            weights.reshape(-1, weights.shape[-1]).contiguous(),
            blocksize=config.block_size,
            compress_statistics=config.double_quant,
            quant_type="nf4",
        )
        state.shape = weights.shape
        expected = {"": packed} | {f".{k}": v for k, v in state.as_dict(packed=True).items()}
        for suffix, tensor in expected.items():
            assert torch.equal(ours[f"{path}.weight{suffix}"], tensor), (path, suffix)
        assert path not in ours


@pytest.mark.parametrize("family", MIXTURES)
def test_biases_routers_and_norms_are_copied_bit_for_bit(tmp_path, family):
    source = tiny_mixture(family, tmp_path / "model")
    ours = stored_tensors(quantized(source, tmp_path / "nf4"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in expert_stacks(model)
        and name.removesuffix(".weight") not in adaptable_linears(model)
    }
    assert any("router" in name or ".gate." in name for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def test_no_more_than_one_expert_is_read_and_quantized_at_a_time(tmp_path, monkeypatch):
    """All of a stack in 16 bits never lie in memory, neither of the files nor on the device."""
    source = tiny_mixture("qwen3_moe", tmp_path / "model")
    at_work = 0

    def quantize(weight, **settings):
        assert weight.shape == (96, 64)
        assert at_work == 1
        return quantize_4bit(weight, **settings)

    def counted(experts):
        nonlocal at_work
        for expert in experts:
            assert expert.untyped_storage().nbytes() == expert.nbytes
            at_work += 1
            yield expert
            at_work -= 1

    monkeypatch.setattr(nf4_codes, "quantize_4bit", quantize)
    with Checkpoint(source).weights() as reader:
        experts = reader.experts("model.layers.0.mlp.experts.gate_up_proj")
        parts = quantize_stack(counted(experts), QuantizeConfig(), device=CPU, transposed=False)
    assert parts["weight"].shape == (11 * 96 * 64 // 2, 1)


def test_experts_in_a_module_of_another_kind_are_refused():
    from transformers import JetMoeConfig

    config = JetMoeConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2,
        kv_channels=8, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = build_config_on_meta(config, dtype=torch.float32)
    assert refusal(check_model, model, {"some": (1, 1)}).startswith(
        "JetMoeForCausalLM keeps the weights of several experts in model.layers.0."
    )


def test_expert_that_would_begin_within_a_block_is_refused(tmp_path):
    stacks = expert_stacks(Checkpoint(tiny_mixture("mixtral", tmp_path)).build(torch.float32))
    check_blocks(stacks, QuantizeConfig(block_size=512))
    odd = {path: type(s)((3, 5, 64), False) for path, s in stacks.items()}
    assert refusal(check_blocks, odd, QuantizeConfig(block_size=128)) == (
        "quantize.block_size = 128: each of the experts in model.layers.0.mlp.experts.gate_up_proj "
        "has 5 x 64 weights, which must be whole blocks. Set a smaller block_size, or choose "
        "another model.source."
    )
