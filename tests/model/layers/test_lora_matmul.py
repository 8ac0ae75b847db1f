"""Dropout and DoRA in the fused nodes, against autograd of the plain formula with their masks."""

from contextlib import ExitStack

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.adapted_layers import SCALE, Layer, random
from tests.support.models import nf4_linear
from tests.support.rounding import lost
from workflow.lib.kernels.rows.dropout import Draw, dropped
from workflow.lib.model.layers.adapter_dropout import row_keys
from workflow.lib.model.layers.fused_norm import FusedNorm
from workflow.lib.model.layers.lora_matmul import nf4_lora_matmul, nf4_lora_matmuls

KEYS = torch.tensor(row_keys(0, step=1, rows=[2, 3]))
KINDS = ("dropout", "dora", "both")


def layers_of(folder, kind, *, bias, count=2):
    """Return linears (7, 13) that share their input, each with a mask and a factor of its own."""
    made = []
    for number in range(count):
        base = nf4_linear(
            folder / str(number), random(7, 13, seed=number), bias=random(7) if bias else None
        )
        factor = (random(7, seed=20 + number).abs() + 0.5).requires_grad_()
        weights = (random(3, 13, seed=6 + number), random(7, 3, seed=8 + number))
        made.append(
            Layer(
                base, *(weight.requires_grad_() for weight in weights),
                factor=None if kind == "dropout" else factor,
                draw=None if kind == "dora" else Draw(KEYS, number, 30_000),
            )
        )  # fmt: skip
    return made


def plain(x, layer, dtype=torch.float64):
    """y = f (x W^T + s (d(x) A^T) B^T) + b, in a type."""
    kept = 1.0
    if layer.draw is not None:
        ones = torch.ones(x.numel() // 13, 13)
        kept = dropped(ones, layer.draw).view_as(x) * layer.draw.scale
    a, b = (weight.to(dtype) for weight in layer.weights)
    weight = layer.base.dequantize(torch.float32).to(dtype)
    y = x.to(dtype) @ weight.t() + SCALE * ((x * kept).to(dtype) @ a.t() @ b.t())
    if layer.factor is not None:
        y = y * layer.factor.to(dtype)
    return y if layer.base.bias is None else y + layer.base.bias.to(dtype)


def leaves(x, layers):
    factors = [layer.factor for layer in layers if layer.factor is not None]
    return [x, *(weight for layer in layers for weight in layer.weights), *factors]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("nodes", ["one node", "a node each"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_autograd_of_the_plain_formula(tmp_path, kind, nodes, bias):
    """Behind a norm, whose output is made again; fp32 against fp64."""
    layers = layers_of(tmp_path, kind, bias=bias)
    norm = FusedNorm(torch.nn.Parameter(torch.ones(13), requires_grad=False), eps=1e-6)
    x = random(2, 5, 13, seed=8).requires_grad_()
    normed = norm(x)
    if nodes == "one node":
        ours = torch.cat(nf4_lora_matmuls(normed, layers))
    else:
        ours = torch.cat([nf4_lora_matmul(normed, layer) for layer in layers])
    reference = torch.cat([plain(norm(x), layer) for layer in layers])
    torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=1e-5)
    grad, given = random(4, 5, 7, seed=9), leaves(x, layers)
    gradients = torch.autograd.grad(ours, given, grad)
    expected = torch.autograd.grad(reference, given, grad.double())
    for one, other in zip(gradients, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_loses_no_more_than_the_plain_formula_in_bf16(tmp_path, kind):
    """To fp64, of each result's largest element: at most 1.8 times as much in 36 draws."""
    layers = layers_of(tmp_path, kind, bias=False)
    x = random(2, 5, 13, seed=8).bfloat16().requires_grad_()
    grad, given = random(4, 5, 7, seed=9).bfloat16(), leaves(x, layers)
    ours, stock, exact = (
        (y, *torch.autograd.grad(y, given, grad.to(y.dtype)))
        for y in map(
            torch.cat,
            (
                nf4_lora_matmuls(x, layers),
                [plain(x, layer, torch.bfloat16) for layer in layers],
                [plain(x, layer) for layer in layers],
            ),
        )
    )
    allowed = 4 * max(map(lost, stock, exact))
    for one, other in zip(ours, exact, strict=True):
        assert lost(one, other) <= allowed


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_gives_the_same_bits(tmp_path, kind):
    layers = layers_of(tmp_path, kind, bias=False)
    x = random(2, 5, 13, seed=8).requires_grad_()

    def outputs(x):
        return torch.cat([*nf4_lora_matmuls(x.sin(), layers), nf4_lora_matmul(x, layers[0])])

    given, results = leaves(x, layers), []
    for y in (outputs(x), checkpoint(outputs, x, use_reentrant=False)):
        results.append((y, *torch.autograd.grad(y.sum(), given)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_mask_is_kept_and_of_dora_the_values(tmp_path, kind):
    layers = layers_of(tmp_path, kind, bias=False)
    saved: list[torch.Tensor] = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    x = random(2, 5, 13).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = nf4_lora_matmuls(x, layers)
    assert saved[0].data_ptr() == x.data_ptr()
    assert [tuple(t.shape) for t in saved[:2]] == [(10, 13), (10, 6)]
    kept = {t.data_ptr() for t in saved[2:] if t.shape == (2, 5, 7)}
    assert kept == (set() if kind == "dropout" else {y.data_ptr() for y in outputs})
    assert len(saved) == (2 if kind == "dropout" else 6)


@pytest.mark.parametrize("kind", ["dropout", "dora"])
def test_casts_that_are_kept_are_made_once_and_change_no_bit(tmp_path, kind):
    layers = layers_of(tmp_path, kind, bias=False)
    x = random(2, 5, 13, seed=8).bfloat16().requires_grad_()
    given, results = leaves(x, layers), []
    for keeps in (False, True):
        with ExitStack() as stack:
            for layer in layers if keeps else []:
                stack.enter_context(layer.shared.unchanged())
            for _ in range(2):  # the second of them finds all casts
                y = torch.cat(nf4_lora_matmuls(x, layers))
                results.append((y, *torch.autograd.grad(y.sum(), given)))
            casts = [cast for layer in layers for cast in (layer.shared.casts() or {}).values()]
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    assert {cast.dtype for cast in casts} == {torch.bfloat16}
    assert len(casts) == (4 if kind == "dropout" else 3), "one A for all without masks, every B"
