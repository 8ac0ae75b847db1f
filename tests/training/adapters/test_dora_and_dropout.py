"""DoRA and dropout beside PEFT's own layers with our masks; what DoRA begins with, and refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

from tests.support.adapter_kinds import base_of
from tests.support.models import adapted, quantized, random_store, stock_base, tiny_llama
from tests.support.refusals import refusal
from tests.support.stock_training import stock_loss, trained_by_peft
from workflow.lib.model.fusion.fuse_layers import fuse_layers_
from workflow.lib.model.layers.adapter_dropout import AdapterDropout, row_keys
from workflow.lib.model.layers.dora import lengthened
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.training.batches import stored_batch


@pytest.mark.parametrize("fused", [False, True], ids=["linear by linear", "fused layers"])
@pytest.mark.parametrize("use_dora", [False, True], ids=["plain", "DoRA"])
def test_dropout_is_pefts_with_our_masks(folder, use_dora, fused):
    """PEFT's own layers, given our masks, have our loss and gradients."""
    ours = adapted(base_of(folder, "dora"), r=4, use_dora=use_dora, dropout=0.4).train()
    if fused:
        fuse_layers_(ours.peft_model.get_base_model())
    base = stock_base(base_of(folder, "dora"))
    config = LoraConfig(
        r=4, lora_alpha=32, lora_dropout=0.4, use_dora=use_dora, target_modules="all-linear",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = get_peft_model(base, config).train()
    give_masks(theirs, ours)
    params = trained_by_peft(theirs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in trainable_parameters(ours).items():
            draw = torch.rand(param.shape, generator=generator)
            param.copy_(param * (0.5 + draw) if "magnitude" in name else 0.2 * draw - 0.1)
            params[name].copy_(param)
    store, rows = random_store(rows=3, seq_len=11), np.arange(3)
    keys = torch.tensor(row_keys(0, step=4, rows=rows))
    batch = replace(stored_batch(store, rows), row_keys=keys)
    loss = ours(batch)
    expected = stock_loss(theirs, batch, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    loss.backward()
    expected.backward()
    for name, param in trainable_parameters(ours).items():
        largest = float(params[name].grad.abs().max())
        torch.testing.assert_close(param.grad, params[name].grad, rtol=1e-3, atol=1e-4 * largest)


def give_masks(theirs, ours):
    layers = [m for m in theirs.modules() if isinstance(m, LoraLayer)]
    assert len(layers) == 21
    for number, layer in enumerate(layers):
        layer.lora_dropout["default"] = AdapterDropout(0.4).train()
        layer.lora_dropout["default"].share(ours.adapters, linear=number)


def test_gradient_of_doras_magnitudes_is_made_in_fp32():
    """300 tokens in bf16: rounded to bf16 the gradient would be off by up to 2^-9 of itself, a
    hundred times the tolerance. Backward has the value, whose own rounding averages out."""
    draw = torch.Generator().manual_seed(0)
    direction = torch.randn(2, 150, 13, generator=draw).bfloat16().requires_grad_()
    factor = (torch.rand(13, generator=draw) + 0.1).requires_grad_()
    grad = torch.randn(2, 150, 13, generator=draw).bfloat16()
    y = lengthened(direction, factor)
    assert torch.equal(y, (direction.float() * factor).bfloat16())
    of_direction, of_factor = torch.autograd.grad(y, (direction, factor), grad)
    assert of_factor.dtype == torch.float32
    directions = (y.detach().double() / factor.detach().double(), direction.detach().double())
    exact, ideal = ((grad.double() * x).sum(dim=(0, 1)) for x in directions)
    torch.testing.assert_close(of_factor.double(), exact, rtol=1e-5, atol=1e-5)
    # 300 errors of at most 2^-9 of a value of order 1: the root of their number times that
    torch.testing.assert_close(of_factor.double(), ideal, rtol=0, atol=5 * 300**0.5 * 2**-9)
    assert torch.equal(of_direction, (grad.float() * factor.detach()).bfloat16())


@torch.no_grad()
def test_dora_of_rows_that_are_not_whole_blocks_starts_as_the_base_model(tiny_base):
    """B is zero, so m / n is 1: the lengths read from the file are those of the weights that are
    multiplied with."""
    ours = adapted(tiny_base, r=4, use_dora=True)
    theirs = stock_base(tiny_base)
    ids, places = torch.arange(13)[None], torch.arange(13)
    expected = theirs(input_ids=ids, use_cache=False).logits[0]
    found = ours.logits(ids, places[None], places)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_row_of_zeros_that_dora_cannot_scale_is_named(tmp_path):
    source = tiny_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][7] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    base = quantized(source, tmp_path / "nf4")
    said = refusal(adapted, base, use_dora=True)
    assert said.startswith(
        "lora.use_dora = true: row 7 of model.layers.1.self_attn.o_proj is zero in the base"
    )
    assert "leave o_proj out of lora.target_modules" in said
    adapted(base, use_dora=True, target_modules=["q_proj"])
