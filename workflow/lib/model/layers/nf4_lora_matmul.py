"""Matmuls with frozen NF4 weights and trained adapters, as autograd nodes.

A node keeps its input and the packed weight, decodes the weight again in backward, and gives
gradients to the input and to the adapter alone. With DoRA it also keeps its value, for the gradient
of the magnitude."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workflow.lib.model.layers.dora import lengthen_backward
from workflow.lib.model.layers.fused_norm import keepable, restored
from workflow.lib.model.layers.lora_matmul import (
    Draws,
    adapted,
    adapter_gradients,
    draws_of,
    input_gradient,
    low_gradient,
    low_rank,
    value,
    values,
)
from workflow.lib.model.layers.split_autograd import apply_split, first_outputs


def nf4_lora_matmul(x: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return W x + b + s B A d(x) for x (..., in_features), of a `FusedLoraLinear`, in two nodes
    (`split_autograd`); with DoRA in one, as backward needs the value."""
    if layer.has_dora():
        return nf4_lora_matmuls(x, [layer])[0]
    draws = draws_of([layer])

    def product(low: torch.Tensor) -> torch.Tensor:
        (linear,) = adapted([layer], draws)
        return value(linear, x, low)

    return apply_split(NF4LoraMatMul, x, layer, draws, *layer.fused_weights(), value=product)


class NF4LoraMatMul(torch.autograd.Function):
    """The gradient of `nf4_lora_matmul`; saves x or its norm's input, and A d(x) (..., r)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: Any, draws: Any, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        low = low_rank(adapted([layer], draws), x.reshape(-1, x.shape[-1]))
        ctx.layers, ctx.draws = [layer], draws
        ctx.norm, source = keepable(x)
        ctx.save_for_backward(source, low)
        return first_outputs(ctx, x, low, out_features=weights[1].shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # grads[1] is that of A d(x), which is not differentiable.
        source, low = ctx.saved_tensors
        grad_x, adapter_grads = _gradients(ctx, source, low, grads[:1])
        return grad_x, None, None, *adapter_grads


def nf4_lora_matmuls(
    x: torch.Tensor, layers: Sequence[Any], *, draws: Draws | None = None
) -> tuple[torch.Tensor, ...]:
    """Return W x + b + s B A d(x), with DoRA as in `dora`, of layers that share their input x (...,
    in_features), by one node. draws: of the masks; None: those of this pass."""
    weights = [weight for layer in layers for weight in layer.fused_weights()]
    factors = [layer.fused_factor(x.dtype) for layer in layers]
    multiply: Callable[..., tuple[torch.Tensor, ...]] = _NF4LoraMatMuls.apply
    outputs = multiply(x, layers, draws or draws_of(layers), *factors, *weights)
    return tuple(
        y if factor is None else _apart(y, layer.get_base_layer().bias, layer)
        for y, factor, layer in zip(outputs, factors, layers, strict=True)
    )


def _apart(y: torch.Tensor, bias: torch.Tensor | None, layer: Any) -> torch.Tensor:
    """Return DoRA's value plus a bias; a copy if the layer's value is changed in place."""
    if bias is not None:
        return y + bias
    return y.clone() if layer.changed_in_place else y


class _NF4LoraMatMuls(torch.autograd.Function):
    """Saves x or its norm's input, A d(x) of all layers, and DoRA's values. One node is enough:
    recomputation needs query, key and value anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layers: Sequence[Any], draws: Draws, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        factors = tensors[: len(layers)]
        ctx.layers, ctx.draws = layers, draws
        rows, linears = x.reshape(-1, x.shape[-1]), adapted(layers, draws)
        low = low_rank(linears, rows)
        ctx.norm, source = keepable(x)
        made = values(linears, x, low, factors)
        # Some families change a node's output in place (OLMo), which autograd forbids for views.
        outputs = tuple(y.view(*x.shape[:-1], -1).detach() for y in made)
        kept = () if factors[0] is None else (*factors, *outputs)
        ctx.save_for_backward(source, low, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, low, *kept = ctx.saved_tensors
        count = len(ctx.layers)
        directions: Sequence[torch.Tensor] = grads
        grad_factors: Sequence[torch.Tensor | None] = [None] * count
        if kept:
            directions, grad_factors = lengthen_backward(grads, kept[count:], kept[:count])
        grad_x, adapter_grads = _gradients(ctx, source, low, directions)
        return grad_x, None, None, *grad_factors, *adapter_grads


def _gradients(
    ctx: Any, source: torch.Tensor, low: torch.Tensor, grads: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradients of x (..., in) (None unless wanted) and of A and B of every layer."""
    flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    linears = adapted(ctx.layers, ctx.draws)
    grad_low = low_gradient(linears, flat)
    # Before the gradient of x: the restored output of a norm is freed before a weight is decoded.
    adapter_grads = adapter_gradients(linears, flat, restored(ctx.norm, source), low, grad_low)
    # The first layer's x comes from a frozen embedding: its gradient would cost a matmul for
    # nothing.
    if not ctx.needs_input_grad[0]:
        return None, adapter_grads
    return input_gradient(linears, flat, grad_low).view(*grads[0].shape[:-1], -1), adapter_grads
