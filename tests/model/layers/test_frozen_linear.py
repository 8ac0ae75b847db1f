"""The NF4 linear against bitsandbytes' own quantization, decoded by hand, and the fused adapter
node against plain autograd."""

from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from torch.utils.checkpoint import checkpoint

from tests.support.adapted_layers import SCALE, Layer, random
from tests.support.models import decoded_by_hand, nf4_linear
from workflow.lib.model.layers.frozen_linear import FrozenLinear
from workflow.lib.model.layers.fused_norm import FusedNorm, keepable, restored
from workflow.lib.model.layers.lora_matmul import nf4_lora_matmul, nf4_lora_matmuls

# (out, in), and what is odd about it at block size 64
SHAPES = {
    "3 blocks, half a byte over": (5, 37),
    "5 blocks": (3, 101),
    "289 blocks, 2 nested, odd everything": (137, 135),
    "512 blocks, 2 whole nested": (256, 128),
    "rows of one block and a quarter": (12, 80),
    "the same, the last block not full": (3, 80),
    "rows of half a block": (5, 32),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("double_quant", [True, False], ids=["double", "single"])
def test_dequantized_weight_is_what_was_quantized_bit_for_bit(
    tmp_path, shape, block_size, double_quant
):
    weight = random(*shape)
    linear = nf4_linear(tmp_path / "base", weight, block_size=block_size, double_quant=double_quant)
    packed, state = quantize_4bit(
        weight, blocksize=block_size, compress_statistics=double_quant, quant_type="nf4"
    )
    expected = decoded_by_hand(packed, state)
    for dtype in (torch.float32, torch.bfloat16):
        ours = linear.dequantize(dtype)
        assert ours.dtype == dtype
        assert torch.equal(ours, expected.to(dtype))


def test_padding_bytes_have_no_influence(tmp_path):
    linear = nf4_linear(tmp_path / "base", random(5, 37))
    before = linear.dequantize(torch.float32)
    for name, size in linear.spec.sizes.items():
        data = linear.get_parameter(name).data.view(torch.uint8)
        data[size:] = 0xFF
    assert linear.absmax.nbytes > linear.spec.sizes["absmax"], (
        "the sizes were chosen to need padding"
    )
    assert torch.equal(linear.dequantize(torch.float32), before)


def test_every_stored_part_is_a_frozen_float32_view_of_its_bytes(tmp_path):
    """float32: FSDP2 rewrites NaN patterns of bf16 groups on CUDA, and refuses frozen uint8 on
    torch 2.11."""
    linear = nf4_linear(tmp_path / "base", random(5, 37), bias=random(5))
    params = dict(linear.named_parameters())
    assert {name: tuple(p.shape) for name, p in params.items()} == {
        "weight": (24,),
        "absmax": (1,),
        "nested_absmax": (1,),
        "bias": (5,),
    }
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in params.values())


@pytest.fixture(params=[None, random(7, seed=5)], ids=["no bias", "bias"])
def layer(request, tmp_path):
    base = nf4_linear(tmp_path / "base", random(7, 13), bias=request.param)
    return Layer(
        base, random(3, 13, seed=6).requires_grad_(), random(7, 3, seed=7).requires_grad_()
    )


def fused(x, layer):
    return nf4_lora_matmul(x, layer)


def plain(x, layer):
    """y = x W^T + b + s (x A^T) B^T, in fp64."""
    base, (a, b) = layer.base, (w.double() for w in layer.weights)
    bias = None if base.bias is None else base.bias.double()
    weight = base.dequantize(torch.float32).double()
    return torch.nn.functional.linear(x.double(), weight, bias) + SCALE * (
        x.double() @ a.t() @ b.t()
    )


def test_fused_adapter_saves_nothing_but_x_and_x_times_a(layer):
    saved: list[torch.Tensor] = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    x = random(2, 3, 13).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fused(x, layer)
    assert [tuple(t.shape) for t in saved] == [(6, 13), (6, 3)]
    assert saved[0].data_ptr() == x.data_ptr(), "x itself, no copy"
    torch.testing.assert_close(saved[1], (x @ layer.weights[0].t()).detach().reshape(6, 3))


def test_input_gradient_of_the_first_layer_is_not_computed(layer):
    """The embedding is frozen: the first layer's x wants no gradient, and its matmul is saved."""
    counted = Counted(layer.base)
    fused(random(4, 13), Layer(counted, *layer.weights)).sum().backward()
    assert counted.calls == 1


def test_recomputation_stops_before_a_product_whose_result_backward_does_not_need(layer):
    """Once in forward, once in backward for the input's gradient; a plain checkpoint would make it
    a third time."""
    counted = Counted(layer.base)
    x = random(4, 13, seed=8).requires_grad_()
    adapted = Layer(counted, *layer.weights)
    out = checkpoint(lambda x: fused(x.relu(), adapted), x, use_reentrant=False)
    gradients = torch.autograd.grad(out.sum(), (x, *layer.weights))
    assert counted.calls == 2
    expected = torch.autograd.grad(fused(x.relu(), layer).sum(), (x, *layer.weights))
    assert all(map(torch.equal, gradients, expected))


class Counted:
    """An NF4 linear that counts its dequantizations."""

    def __init__(self, base: FrozenLinear) -> None:
        self._base, self.calls = base, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        self.calls += 1
        return self._base.dequantize(dtype)


def test_master_gradients_are_float32_under_bfloat16_activations(layer):
    x = random(4, 13).bfloat16().requires_grad_()
    base = layer.base
    if base.bias is not None:
        base.bias.data = base.bias.data.bfloat16()
    out = fused(x, layer)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert [t.grad.dtype for t in (x, *layer.weights)] == [
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]


@pytest.mark.parametrize("nodes", ["one node", "a node each"])
def test_input_that_a_norm_has_made_is_made_again_and_not_kept(layer, nodes):
    """Two linears share it; gradients are those of autograd through norm and plain formula, in
    fp64."""
    norm = FusedNorm(torch.nn.Parameter(random(13, seed=1) + 2.0, requires_grad=False), eps=1e-6)
    x = random(2, 3, 13, seed=8).requires_grad_()
    saved: list[torch.Tensor] = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    normed = norm(x)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if nodes == "one node":
            ours = torch.cat(nf4_lora_matmuls(normed, [layer, layer]))
        else:
            ours = torch.cat([nf4_lora_matmul(normed, layer), nf4_lora_matmul(normed, layer)])
    wide = [tensor for tensor in saved if tensor.shape == (6, 13)]
    assert sum(tensor.numel() for tensor in saved) == 13 * 6 * len(wide) + 6 * 6
    assert all(tensor.data_ptr() == x.data_ptr() for tensor in wide)
    weight, wide = norm.weight.double(), x.double()
    by_hand = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
    reference = torch.cat([plain(by_hand, layer)] * 2)
    grad = random(4, 3, 7, seed=9)
    gradients = torch.autograd.grad(ours, (x, *layer.weights), grad)
    expected = torch.autograd.grad(reference, (x, *layer.weights), grad.double())
    for name, one, other in zip(("dx", "dA", "dB"), gradients, expected, strict=True):
        torch.testing.assert_close(
            one.double(), other.double(), rtol=1e-5, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_output_of_a_norm_that_was_changed_is_kept_itself(layer):
    norm = FusedNorm(torch.nn.Parameter(torch.ones(13), requires_grad=False), eps=1e-6)
    normed = norm(random(2, 13, seed=8)).mul_(3.0)
    source_norm, source = keepable(normed)
    assert source_norm is None
    assert torch.equal(restored(source_norm, source), normed)
