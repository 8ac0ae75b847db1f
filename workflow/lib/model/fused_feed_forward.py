"""A gated feed-forward with adapters in one node: y = down(act(gate(x)) * up(x)).

Backward keeps x, or what it was normed from, gate(x) and up(x) alone, and makes the product that
`down` takes anew: two wide tensors (T, f) less than one node per linear. It is two nodes
(`layers.two_nodes`), so recomputation of a layer makes neither the product nor `down` again. With
DoRA a third node gives the rows of `down` their lengths, and keeps its value.

On a GPU gate(x) and up(x) are kept without their adapters' parts, and so is the product's gradient:
the kernels that read them add the parts (`fused_kernels.low_rank`). DoRA needs whole values.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from workflow.lib.model.layers import kernels
from workflow.lib.model.layers.adapter_dropout import drop_
from workflow.lib.model.layers.dora import lengthened, summed_products
from workflow.lib.model.layers.fused_kernels import low_rank as low_rank_kernels
from workflow.lib.model.layers.fused_kernels.low_rank import LowRank
from workflow.lib.model.layers.lora_linear import FusedLoraLinear
from workflow.lib.model.layers.lora_products import (
    Adapted,
    Draws,
    adapted,
    adapter_gradients,
    draws_of,
    frozen_values,
    input_gradient,
    low_gradient,
    low_rank,
    split_input_gradient,
    updates,
    value,
    values,
)
from workflow.lib.model.layers.rms_norm import keepable, restored
from workflow.lib.model.layers.two_nodes import apply_two_nodes, first_outputs

LINEARS = ("gate_proj", "up_proj", "down_proj")
Gates = tuple[torch.Tensor, torch.Tensor]


class FusedFeedForward(nn.Module):
    """Takes the place of a family's module with `gate_proj`, `up_proj`, `down_proj`, `act_fn`; they
    keep their names.

    Where one node cannot compute an adapter (switched off, DoRA with dropout or biases) the linears
    compute one by one, as in the family.
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
        layers: list[Any] = [self.get_submodule(name) for name in LINEARS]
        if not all(map(_fits_node, layers)):
            gate, up, down = layers
            return cast("torch.Tensor", down(self.act_fn(gate(x)) * up(x)))
        draws = draws_of(layers)
        factors = [layer.fused_factor(x.dtype) for layer in layers]
        weights = [weight for layer in layers for weight in layer.fused_weights()]

        def output(gate: torch.Tensor, up: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
            *into, down = adapted(layers, draws)
            parts = updates(into, low) if _kernels_add(gate, factors) else []
            product = _act_and_mul(gate, up, parts, self._activation)
            return value(down, product, low_rank([down], product))

        options = layers, draws, self._activation
        y = apply_two_nodes(_FeedForwardGradient, x, *options, *factors[:2], *weights, value=output)
        return y if factors[2] is None else lengthened(y, factors[2])


def _fits_node(layer: nn.Module) -> bool:
    """Whether the node can compute this linear now."""
    if not isinstance(layer, FusedLoraLinear) or not layer.can_share_node():
        return False
    return not layer.has_dora() or layer.get_base_layer().bias is None


class _FeedForwardGradient(torch.autograd.Function):
    """The gradient of the feed-forward, without the lengths of `down`. Its intermediates are
    gate(x), up(x) and A d(x) of both.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layers: Any, draws: Draws, activation: str, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        factors = tensors[:2]
        rows = x.reshape(-1, x.shape[-1])
        into = adapted(layers[:2], draws[:2])
        low = low_rank(into, rows)
        if _kernels_add(rows, factors):
            gate, up = frozen_values(into, x)
        else:
            gate, up = values(into, x, low, factors)
        ctx.norm, source = keepable(x)
        ctx.layers, ctx.draws, ctx.activation = layers, draws, activation
        ctx.save_for_backward(source, gate, up, low, *(x for x in factors if x is not None))
        out_features = layers[2].get_base_layer().out_features
        return first_outputs(ctx, x, gate, up, low, out_features=out_features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, *kept = ctx.saved_tensors
        low = kept[2]
        into, down = _adapted(ctx)
        grad = [grads[0].reshape(-1, grads[0].shape[-1])]
        of_low = low_gradient(down, grad)
        parts, product, of_factors = _through_product(
            [*into, *down], grad[0], of_low, kept, ctx.activation
        )
        of_down = _product_gradients(down[0], grad, product, of_low)
        del product  # (T, f), before the weights of gate and up are decoded
        of_low = low_gradient(into, parts)
        of_into = adapter_gradients(into, parts, restored(ctx.norm, source), low, of_low)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(into, parts, of_low).view(*grads[0].shape[:-1], -1)
        return grad_x, None, None, None, *of_factors, *of_into, *of_down


def _adapted(ctx: Any) -> tuple[list[Adapted], list[Adapted]]:
    """Return gate and up, and down, whose A is used twice: within the node it is cast once."""
    *into, down = adapted(ctx.layers, ctx.draws)
    return into, [down._replace(casts={}) if down.casts is None else down]


def _through_product(
    linears: Sequence[Adapted],
    grad: torch.Tensor,
    of_low: torch.Tensor,
    kept: Sequence[torch.Tensor],
    activation: str,
) -> tuple[Gates, torch.Tensor, Sequence[torch.Tensor | None]]:
    """Return the gradients of gate and up for that of `down`, the product, and the gradients of
    DoRA's factors.

    of_low: the gradient of what `down`'s adapter makes of the product; kept: gate, up, `low_rank`
    of both, and DoRA's factors. The gradient of the product comes first, so that one kernel can
    make the product and both gradients from it. On a GPU it overwrites gate and up, which nobody
    else needs.
    """
    *into, down = linears
    gate, up, low, *factors = kept
    if not _kernels_add(gate, factors):
        of_product = input_gradient([down], [grad], of_low)
        return _plain_backward_(of_product, gate, up, factors, activation)
    of_product, of_adapter = split_input_gradient(down, grad, of_low)
    of_gate, of_up = updates(into, low)
    low_rank_kernels.act_and_mul_backward_(
        of_product, gate, up, (of_gate, of_up, of_adapter), activation=activation
    )
    return (gate, up), of_product, [None, None]


def _product_gradients(
    down: Adapted, grad: Sequence[torch.Tensor], product: torch.Tensor, of_low: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of A and B of `down`. The product (T, f) may be overwritten."""
    if down.draw is not None:
        drop_(product, down.draw)
    plain = [down._replace(draw=None)]
    return adapter_gradients(plain, grad, product, low_rank(plain, product), of_low)


def _kernels_add(x: torch.Tensor, factors: Sequence[torch.Tensor | None]) -> bool:
    """Whether kernels add the adapters' parts to gate and up. factors: those of DoRA, or Nones."""
    return kernels.usable(x.device) and not any(factor is not None for factor in factors)


def _act_and_mul(
    gate: torch.Tensor, up: torch.Tensor, parts: Sequence[LowRank], activation: str
) -> torch.Tensor:
    """Return act(gate) * up, with their parts, if those are not in them."""
    if kernels.usable(gate.device):
        of_gate, of_up = parts or (low_rank_kernels.no_part(gate),) * 2
        return low_rank_kernels.act_and_mul(gate, up, of_gate, of_up, activation=activation)
    return ACTIVATIONS[activation][0](gate).mul_(up)


def _plain_backward_(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    factors: Sequence[torch.Tensor],
    activation: str,
) -> tuple[Gates, torch.Tensor, Sequence[torch.Tensor | None]]:
    """Return the gradients of gate and up for that of their product, and the product; with row
    factors the gradients are those of the directions, and the factors' come third. What is given
    may be overwritten.
    """
    if factors:
        return _lengthened_backward_(grad, gate, up, factors, activation)
    parts, product = _act_and_mul_backward(grad, gate, up, activation)
    return parts, product, [None, None]


def _act_and_mul_backward(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str
) -> tuple[Gates, torch.Tensor]:
    function, gradients = ACTIVATIONS[activation]
    product = function(gate).mul_(up)
    return gradients(grad, gate, up), product


def _lengthened_backward_(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    factors: Sequence[torch.Tensor],
    activation: str,
) -> tuple[Gates, torch.Tensor, list[torch.Tensor | None]]:
    """The same with row factors."""
    sums: Sequence[torch.Tensor]
    if kernels.usable(gate.device):
        both = kernels.lengthened_act_and_mul_backward_(
            grad, gate, up, factors, activation=activation
        )
        sums = both.unbind()
        parts, product = (gate, up), grad
    else:
        parts, product = _act_and_mul_backward(grad, gate, up, activation)
        sums = [summed_products(part, y) for part, y in zip(parts, (gate, up), strict=True)]
        for part, factor in zip(parts, factors, strict=True):
            part.mul_(factor)
    return parts, product, [total / x for total, x in zip(sums, factors, strict=True)]


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


Parts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Gates]
ACTIVATIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Parts]] = {
    "silu": (nn.functional.silu, _silu_parts),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_parts),
}
