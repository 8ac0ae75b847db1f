"""Products with frozen NF4 weights and trained adapters, as autograd nodes.

A node keeps its input and the packed weight; it decodes the weight again in backward, and gives
gradients to the input and to the adapter alone."""

from collections.abc import Sequence
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


def nf4_lora_matmul(x: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return W x + b + s B (A x) for x (..., in_features): dequantization, product and adapter in
    two nodes.

    layer: as `lora_products.adapted` wants it.
    The first node has all that backward needs, the second makes the value and keeps nothing. So
    when activations are recomputed and only this layer's input is still missing (the last linear of
    a decoder layer), recomputation stops
    between them: the product, whose result backward does not need, is not made again.
    """
    placeholder, low = NF4LoraMatMul.apply(x, layer, *layer.fused_weights())  # type: ignore[no-untyped-call]
    y: torch.Tensor = _NF4LoraValue.apply(placeholder, x.detach(), low, layer)  # type: ignore[no-untyped-call]
    return y


class NF4LoraMatMul(torch.autograd.Function):
    """The gradient of `nf4_lora_matmul`. Its output is a placeholder of the value's shape without
    memory, and A x.

    Saves x (..., in), or what it was normed from, and A x (..., r) alone.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: Any, a_weight: torch.Tensor, b_weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        low = low_rank(adapted([layer]), rows)
        ctx.layer = layer
        ctx.norm, kept = keepable(x)
        ctx.save_for_backward(kept, low)
        ctx.mark_non_differentiable(low)
        ctx.set_materialize_grads(False)  # else backward gets zeros (T, r) for A x
        return x.new_empty(()).expand(*x.shape[:-1], b_weight.shape[0]), low

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, of_adapter = _gradients(ctx, [ctx.layer], grads[:1], norm=ctx.norm)
        return grad_x, None, *of_adapter


class _NF4LoraValue(torch.autograd.Function):
    """The value of `nf4_lora_matmul`. Hands its gradient to the placeholder, so to `NF4LoraMatMul`;
    saves nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, placeholder: torch.Tensor, x: torch.Tensor, low: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        (linear,) = adapted([layer])
        return value(linear, x.reshape(-1, x.shape[-1]), low).view(placeholder.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None, None


def nf4_lora_matmuls(x: torch.Tensor, layers: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return W x + b + s B (A x) of layers that share their input x (..., in_features), by one
    node.
    """
    weights = [weight for layer in layers for weight in layer.fused_weights()]
    made: tuple[torch.Tensor, ...] = _NF4LoraMatMuls.apply(x, layers, *weights)  # type: ignore[no-untyped-call]
    return made


class _NF4LoraMatMuls(torch.autograd.Function):
    """Saves x, or what it was normed from, and A x of all layers."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layers: Sequence[Any], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows, linears = x.reshape(-1, x.shape[-1]), adapted(layers)
        low = low_rank(linears, rows)
        ctx.norm, kept = keepable(x)
        ctx.layers = layers
        ctx.save_for_backward(kept, low)
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
    kept, low = ctx.saved_tensors
    flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    linears = adapted(layers)
    of_low = low_gradient(linears, flat)
    of_adapters = adapter_gradients(linears, flat, restored(norm, kept), low, of_low)
    if not ctx.needs_input_grad[0]:
        return None, of_adapters
    return input_gradient(linears, flat, of_low).view(*grads[0].shape[:-1], -1), of_adapters
