"""A gated feed-forward with adapters in one node: y = down(act(gate(x)) * up(x)).

Backward keeps x, or what it was normed from, gate(x) and up(x) alone, and makes the product that
`down` takes anew: two wide tensors (T, f) less than one node per linear. It is two nodes
(`layers.two_nodes`), so recomputation of a layer makes neither the product nor `down` again.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from workflow.lib.model.layers import kernels
from workflow.lib.model.layers.lora_products import (
    adapted,
    adapter_gradients,
    input_gradient,
    low_gradient,
    low_rank,
    value,
    values,
)
from workflow.lib.model.layers.rms_norm import keepable, restored
from workflow.lib.model.layers.two_nodes import apply_two_nodes, first_outputs
from workflow.lib.model.lora import FusedLoraLinear

LINEARS = ("gate_proj", "up_proj", "down_proj")


class FusedFeedForward(nn.Module):
    """Takes the place of a family's module with `gate_proj`, `up_proj`, `down_proj`, `act_fn`; they
    keep their names.

    Where an adapter is not plain (dropout, DoRA, switched off) the linears compute one by one, as
    in the family.
    """

    def __init__(self, original: nn.Module, *, activation: str) -> None:
        """activation: `silu` or `gelu_tanh`, what `original.act_fn` is."""
        super().__init__()
        for name in LINEARS:
            setattr(self, name, original.get_submodule(name))
        act_fn: Any = original.act_fn
        self.act_fn: Callable[[torch.Tensor], torch.Tensor] = act_fn
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return down(act(gate(x)) * up(x)); x: (..., hidden_size)."""
        layers = [self.get_submodule(name) for name in LINEARS]
        if not all(
            isinstance(layer, FusedLoraLinear) and layer.is_plain_lora() for layer in layers
        ):
            gate, up, down = layers
            return cast("torch.Tensor", down(self.act_fn(gate(x)) * up(x)))
        weights = [weight for layer in layers for weight in cast("Any", layer).fused_weights()]

        def output(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            product, down = _act_and_mul(gate, up, self._activation), adapted(layers[2:])
            return value(down[0], product, low_rank(down, product))

        return apply_two_nodes(
            _FeedForwardGradient, x, layers, self._activation, *weights, value=output
        )


class _FeedForwardGradient(torch.autograd.Function):
    """The gradient of the feed-forward. Its intermediates are gate(x) and up(x)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layers: Any, activation: str, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])
        into = adapted(layers[:2])
        low = low_rank(into, rows)
        gate, up = values(into, rows, low)
        ctx.norm, source = keepable(x)
        ctx.layers, ctx.activation = layers, activation
        ctx.save_for_backward(source, gate, up, low)
        out_features = layers[2].get_base_layer().out_features
        return first_outputs(ctx, x, gate, up, out_features=out_features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A GPU's kernel overwrites gate and up, which nobody else needs.
        source, gate, up, low = ctx.saved_tensors
        linears = adapted(ctx.layers)
        into, down = linears[:2], linears[2:]
        grad = [grads[0].reshape(-1, grads[0].shape[-1])]
        # The gradient of the product first, so that one kernel can make the product and both
        # gradients from it.
        of_low = low_gradient(down, grad)
        parts, product = _act_and_mul_backward_(
            input_gradient(down, grad, of_low), gate, up, ctx.activation
        )
        of_down = adapter_gradients(down, grad, product, low_rank(down, product), of_low)
        del product  # (T, f), before the weights of gate and up are decoded
        of_low = low_gradient(into, parts)
        of_into = adapter_gradients(into, parts, restored(ctx.norm, source), low, of_low)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(into, parts, of_low).view(*grads[0].shape[:-1], -1)
        return grad_x, None, None, *of_into, *of_down


def _act_and_mul(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(gate) * up."""
    if kernels.usable(gate.device):
        return kernels.act_and_mul(gate, up, activation=activation)
    return ACTIVATIONS[activation][0](gate).mul_(up)


def _act_and_mul_backward_(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the gradients of gate and up for that of their product, and the product. What is given
    may be overwritten.
    """
    if kernels.usable(gate.device):
        kernels.act_and_mul_backward_(grad, gate, up, activation=activation)
        return (gate, up), grad
    function, gradients = ACTIVATIONS[activation]
    product = function(gate).mul_(up)
    return gradients(grad, gate, up), product


def _silu_parts(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate(x) and up(x) for that of silu(gate(x)) * up(x), which is
    overwritten.
    """
    of_up = nn.functional.silu(gate).mul_(grad)
    return torch.ops.aten.silu_backward(grad.mul_(up), gate), of_up


def _gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(gate, approximate="tanh")


def _gelu_tanh_parts(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `_silu_parts` for the GELU by tanh."""
    of_up = _gelu_tanh(gate).mul_(grad)
    return torch.ops.aten.gelu_backward(grad.mul_(up), gate, approximate="tanh"), of_up


Parts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Parts]] = {
    "silu": (nn.functional.silu, _silu_parts),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_parts),
}
