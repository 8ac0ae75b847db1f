"""Products with frozen NF4 weights and trained adapters, as autograd nodes.

A node keeps its input and the packed weight; it decodes the weight again in backward, and gives
gradients to the input and to the adapter alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workflow.lib.model.layers.lora_products import (
    adapted,
    adapter_gradients,
    input_gradient,
    low_gradient,
    low_rank,
    value,
    values,
)
from workflow.lib.model.layers.rms_norm import RmsNorm, keepable, restored
from workflow.lib.model.layers.two_nodes import apply_two_nodes, first_outputs


def nf4_lora_matmul(x: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return W x + b + s B (A x) for x (..., in_features): dequantization, product and adapter in
    two nodes, for the reason that `two_nodes` gives.

    layer: as `lora_products.adapted` wants it.
    """

    def product(low: torch.Tensor) -> torch.Tensor:
        (linear,) = adapted([layer])
        return value(linear, x.reshape(-1, x.shape[-1]), low)

    return apply_two_nodes(NF4LoraMatMul, x, layer, *layer.fused_weights(), value=product)


class NF4LoraMatMul(torch.autograd.Function):
    """The gradient of `nf4_lora_matmul`. Its intermediate is A x.

    Saves x (..., in), or what it was normed from, and A x (..., r) alone.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: Any, a_weight: torch.Tensor, b_weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        low = low_rank(adapted([layer]), x.reshape(-1, x.shape[-1]))
        ctx.layer = layer
        ctx.norm, source = keepable(x)
        ctx.save_for_backward(source, low)
        return first_outputs(ctx, x, low, out_features=b_weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # grads[1] is that of A x, which is not differentiable.
        grad_x, of_adapter = _gradients(ctx, [ctx.layer], grads[:1], norm=ctx.norm)
        return grad_x, None, *of_adapter


def nf4_lora_matmuls(x: torch.Tensor, layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return W x + b + s B (A x) of layers that share their input x (..., in_features), by one
    node.
    """
    weights = [weight for layer in layers for weight in layer.fused_weights()]
    multiply: Callable[..., tuple[torch.Tensor, ...]] = _NF4LoraMatMuls.apply
    return multiply(x, layers, *weights)


class _NF4LoraMatMuls(torch.autograd.Function):
    """Saves x, or what it was normed from, and A x of all layers.

    One node and not two: query, key and value are needed to recompute what follows, so
    recomputation never ends before them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layers: Sequence[Any], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows, linears = x.reshape(-1, x.shape[-1]), adapted(layers)
        low = low_rank(linears, rows)
        ctx.norm, source = keepable(x)
        ctx.layers = layers
        ctx.save_for_backward(source, low)
        return tuple(y.view(*x.shape[:-1], -1) for y in values(linears, rows, low))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, of_adapters = _gradients(ctx, ctx.layers, grads, norm=ctx.norm)
        return grad_x, None, *of_adapters


def _gradients(
    ctx: Any, layers: Sequence[Any], grads: Sequence[torch.Tensor], *, norm: RmsNorm | None = None
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradient of x (..., in), None unless it is wanted, and those of A and B of every
    layer.
    """
    source, low = ctx.saved_tensors
    flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    linears = adapted(layers)
    of_low = low_gradient(linears, flat)
    # Before the gradient of x: what is restored of a norm's output is freed before a weight is
    # decoded.
    of_adapters = adapter_gradients(linears, flat, restored(norm, source), low, of_low)
    # The first layer's x comes from a frozen embedding: its gradient would cost a product for
    # nothing.
    if not ctx.needs_input_grad[0]:
        return None, of_adapters
    return input_gradient(linears, flat, of_low).view(*grads[0].shape[:-1], -1), of_adapters
