"""Nodes of frozen matmuls in 8 bits, against the plain formula with rounded weights and
activations; and what must not be in 8 bits."""

import pytest
import torch

from tests.support.adapted_layers import SCALE, Layer, random
from tests.support.models import nf4_linear
from workflow.lib.kernels.eight_bits.matmul import decoded, rounded, row_scales
from workflow.lib.model.layers import frozen_linear as frozen_linear_module
from workflow.lib.model.layers.frozen_linear import MatmulPrecision, frozen_linear
from workflow.lib.model.layers.lora_matmul import nf4_lora_matmul, nf4_lora_matmuls

OUT, IN, RANK = 48, 192, 3
WAYS = {
    "both": {"forward": True, "backward": True},
    "forward": {"forward": True},
    "backward": {"backward": True},
}


def layers_of(folder, types, *, bias, count=2):
    made = []
    for number in range(count):
        vector = random(OUT, seed=30 + number) if bias else None
        base = nf4_linear(folder / str(number), random(OUT, IN, seed=number), bias=vector)
        base.matmul_precision = types
        weights = random(RANK, IN, seed=6 + number), random(OUT, RANK, seed=8 + number)
        made.append(Layer(base, *(weight.requires_grad_() for weight in weights)))
    return made


def exact_weight(linear, float8):
    """W, or W in 8 bits times its scales, in fp64."""
    if not float8:
        return linear.dequantize(torch.float32).double()
    data = linear.stored()
    scales = row_scales(data, linear.spec.shape)
    values = decoded(data, scales, linear.spec.shape)
    return values.double() * scales.double()[:, None]


def exact_rows(rows, float8):
    """Rows, or what they are in 8 bits, in fp64."""
    if not float8:
        return rows.double()
    copy = rounded(rows)
    return copy.values.double() * copy.scales.double()


def expected_value(x, layer, float8):
    a, b = (weight.double() for weight in layer.weights)
    y = exact_rows(x, float8) @ exact_weight(layer.base, float8).t()
    y = y + SCALE * (x.double() @ a.t() @ b.t())
    return y if layer.base.bias is None else y + layer.base.bias.double()


def expected_gradient(grad, layer, float8):
    """Of x: the rows' scales are in the gradient when it is rounded."""
    a, b = (weight.double() for weight in layer.weights)
    of_x = SCALE * (grad.double() @ b @ a)
    if not float8:
        return of_x + grad.double() @ exact_weight(layer.base, float8)
    scales = row_scales(layer.base.stored(), (OUT, IN))
    exact = exact_weight(layer.base, float8) / scales.double()[:, None]
    return of_x + exact_rows(grad * scales, float8) @ exact


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("nodes", ["one node", "a node each"])
def test_values_and_gradients_are_those_of_rounded_products(tmp_path, where, nodes, bias):
    """fp32 against fp64. A and B get the gradients of exact matmuls: only W is in 8 bits."""
    types = MatmulPrecision(**WAYS[where])
    layers = layers_of(tmp_path, types, bias=bias)
    x, grads = random(6, IN, seed=2).requires_grad_(), [random(6, OUT, seed=s) for s in (3, 4)]
    forward, backward = types.by_pass
    with types.in_eight_bits():
        if nodes == "one node":
            ours = nf4_lora_matmuls(x, layers)
        else:
            ours = tuple(nf4_lora_matmul(x, layer) for layer in layers)
        given = [x, *(weight for layer in layers for weight in layer.weights)]
        of_x, *of_adapters = torch.autograd.grad(ours, given, grads)
    expected = [expected_value(x, layer, forward) for layer in layers]
    torch.testing.assert_close([y.double() for y in ours], expected, rtol=1e-5, atol=1e-4)
    of_values = [
        expected_gradient(grad, layer, backward) for grad, layer in zip(grads, layers, strict=True)
    ]
    torch.testing.assert_close(of_x.double(), sum(of_values), rtol=1e-5, atol=1e-4)
    for layer, grad, (of_a, of_b) in zip(
        layers, grads, zip(of_adapters[::2], of_adapters[1::2], strict=True), strict=True
    ):
        a, b = layer.weights
        torch.testing.assert_close(of_a, SCALE * b.t() @ grad.t() @ x, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(of_b, SCALE * grad.t() @ x @ a.t(), rtol=1e-4, atol=1e-3)


def test_linear_without_adapter_is_multiplied_in_8_bits_too(tmp_path):
    types = MatmulPrecision(**WAYS["both"])
    (layer,) = layers_of(tmp_path, types, bias=True, count=1)
    x, grad = random(2, 3, IN, seed=2).requires_grad_(), random(2, 3, OUT, seed=3)
    for weight in layer.weights:
        weight.data.zero_()
    with types.in_eight_bits():
        y = frozen_linear(x, layer.base, bias=True)
        (of_x,) = torch.autograd.grad(y, x, grad)
    expected = expected_value(x.reshape(-1, IN), layer, float8=True)
    torch.testing.assert_close(y.flatten(0, 1).double(), expected, rtol=1e-5, atol=1e-4)
    for_rows = expected_gradient(grad.reshape(-1, OUT), layer, float8=True)
    torch.testing.assert_close(of_x.flatten(0, 1).double(), for_rows, rtol=1e-5, atol=1e-4)


def test_linears_that_share_their_input_share_its_rounded_copy(tmp_path, monkeypatch):
    types = MatmulPrecision(forward=True)
    layers = layers_of(tmp_path, types, bias=False)
    calls = []
    monkeypatch.setattr(
        frozen_linear_module,
        "rounded",
        lambda *args, **kw: calls.append(args) or rounded(*args, **kw),
    )
    with types.in_eight_bits():
        nf4_lora_matmuls(random(6, IN), layers)
    assert len(calls) == 1


def test_outside_of_the_block_no_bit_is_another(tmp_path):
    types, plain = MatmulPrecision(**WAYS["both"]), MatmulPrecision()
    results = []
    for number, used in enumerate((types, plain)):
        (layer,) = layers_of(tmp_path / str(number), used, bias=True, count=1)
        x = random(6, IN, seed=2).requires_grad_()
        with types.in_eight_bits() if used is plain else plain.in_eight_bits():
            y = nf4_lora_matmul(x, layer)
            results.append((y, *torch.autograd.grad(y.sum(), (x, *layer.weights))))
    assert all(map(torch.equal, *results))
