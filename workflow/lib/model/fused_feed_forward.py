"""A gated feed-forward with adapters in one node: y = down(act(gate(x)) * up(x)).

Falcon H1 also multiplies gate(x) and y by constants. Backward keeps x or its norm's input, gate(x)
and up(x), and recomputes the product: two wide tensors (T, f) less than one node per linear. With
two nodes (`layers.split_autograd`) recomputation skips the product and `down`; a third one rescales
`down` (DoRA). One linear may compute gate and up as halves of its output. On a GPU without DoRA,
kernels add the adapters' parts of small ranks where they read gate, up and the product's gradient
(`kernels.rows.gating`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.rows.dropout import drop_
from workflow.lib.kernels.rows.gating import (
    WIDEST_PART,
    Gating,
    LowRank,
    act_and_mul,
    act_and_mul_backward_,
    lengthened_act_and_mul_backward_,
    no_part,
)
from workflow.lib.model.layers.dora import lengthened
from workflow.lib.model.layers.fused_norm import keepable, restored
from workflow.lib.model.layers.lora_linear import FusedLoraLinear
from workflow.lib.model.layers.lora_matmul import (
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
from workflow.lib.model.layers.split_autograd import apply_split, first_outputs
from workflow.lib.model.layers.token_tiles import TokenTiles

Gates = tuple[torch.Tensor, torch.Tensor]
Factors = Sequence[torch.Tensor | None]


class Form(NamedTuple):
    """The formula of a gated feed-forward, and its family's names of the linears."""

    into: tuple[str, ...]
    """The linears of gate and up, or the one of both side by side, gate first."""
    down: str
    activation: str  # one of `kernels.rows.gating.ACTIVATIONS`
    gate_multiplier: float = 1.0  # of gate(x)
    output_multiplier: float = 1.0  # of the output of `down`
    dropout: float = 0.0  # share of the output that training drops

    @property
    def gating(self) -> Gating:
        return Gating(self.activation, self.gate_multiplier)


class FusedFeedForward(nn.Module):
    """Replaces a family's module; its linears keep their names. They compute one by one where one
    node cannot (adapter off, DoRA with dropout or biases)."""

    tiles: TokenTiles | None = None

    def __init__(self, original: nn.Module, *, form: Form) -> None:
        """form: what `original` computes."""
        super().__init__()
        for name in (*form.into, form.down):
            setattr(self, name, original.get_submodule(name))
        self._form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return down(act(gate(x)) * up(x)), with the form's multipliers; x: (..., hidden)."""
        y = self.compute(x) if self.tiles is None else self.tiles.output(self, x)
        form = self._form
        if form.output_multiplier != 1.0:
            y = y * form.output_multiplier
        return nn.functional.dropout(y, form.dropout, self.training) if form.dropout else y

    def compute(self, x: torch.Tensor, *, valued: bool = True) -> torch.Tensor:
        """Return the same without what follows `down`; as `token_tiles.Tiled.compute`."""
        form = self._form
        layers: list[Any] = [self.get_submodule(name) for name in (*form.into, form.down)]
        if not all(map(_fits_node, layers)):
            return self._by_linear(x, layers)
        draws = draws_of(layers)
        *factors, last_factor = [layer.fused_factor(x.dtype) for layer in layers]
        weights = [weight for layer in layers for weight in layer.fused_weights()]

        def output(*intermediates: torch.Tensor) -> torch.Tensor:
            *made, low = intermediates
            *into, down = linears = adapted(layers, draws)
            gates = _halves(made)
            parts = (no_part(gates[0]),) * 2
            if _kernels_add(linears, low, factors, form):
                parts = _part_halves(updates(into, low))
            product = act_and_mul(*gates, *parts, form.gating)
            return value(down, product, low_rank([down], product))

        options = layers, draws, form
        y = apply_split(
            _FeedForwardGradient,
            *(x, *options, *factors, *weights),
            value=output,
            valued=valued or last_factor is not None,
        )
        if last_factor is None:
            return y
        kept = lengthened(y, last_factor)
        return kept.clone() if layers[-1].changed_in_place else kept

    def _by_linear(self, x: torch.Tensor, layers: Sequence[nn.Module]) -> torch.Tensor:
        *into, down = layers
        gate, up = _halves([layer(x) for layer in into])
        y: torch.Tensor = down(self._form.gating.activated(gate) * up)
        return y


def _fits_node(layer: nn.Module) -> bool:
    """Whether the node can compute this linear now."""
    if not isinstance(layer, FusedLoraLinear) or not layer.can_share_node():
        return False
    return not layer.has_dora() or layer.get_base_layer().bias is None


def _halves(tensors: Sequence[torch.Tensor]) -> Gates:
    """Split tensors into the tensors of gate and of up: two tensors, or the halves of the only
    one."""
    gate, up = tensors if len(tensors) == 2 else tensors[0].chunk(2, dim=-1)
    return gate, up


def _part_halves(parts: Sequence[LowRank]) -> tuple[LowRank, LowRank]:
    """Split the adapters' parts likewise; halves share their low-rank rows."""
    if len(parts) == 2:
        return parts[0], parts[1]
    gate, up = parts[0].small.chunk(2, dim=-1)
    return parts[0]._replace(small=gate), parts[0]._replace(small=up)


def _joined(halves: Sequence[torch.Tensor], like: Sequence[object]) -> list[torch.Tensor]:
    """Join tensors of gate and up as in `like`: two, or one."""
    return [*halves] if len(like) == 2 else [torch.cat([*halves], dim=-1)]


class _Kept(NamedTuple):
    """Tensors kept for backward besides the input."""

    made: Sequence[torch.Tensor]
    """gate(x) and up(x), or both in one; without the adapters' parts if kernels add them."""
    low: torch.Tensor  # `low_rank` of them
    factors: Sequence[torch.Tensor]  # DoRA's, or none


class _FeedForwardGradient(torch.autograd.Function):
    """The gradient of the feed-forward but DoRA's lengths of `down`, from gate, up and A d(x)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layers: Any, draws: Draws, form: Form, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        factors = tensors[: len(form.into)]
        rows = x.reshape(-1, x.shape[-1])
        *into, _ = linears = adapted(layers, draws)
        low = low_rank(into, rows)
        if _kernels_add(linears, rows, factors, form):
            made = frozen_values(into, x)
        else:
            made = values(into, x, low, factors)
        ctx.norm, source = keepable(x)
        ctx.layers, ctx.draws, ctx.form = layers, draws, form
        ctx.save_for_backward(source, *made, low, *(x for x in factors if x is not None))
        out_features = layers[-1].get_base_layer().out_features
        return first_outputs(ctx, x, *made, low, out_features=out_features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        source, *saved = ctx.saved_tensors
        count = len(ctx.form.into)
        kept = _Kept(saved[:count], saved[count], saved[count + 1 :])
        into, down = _adapted(ctx)
        grad = [grads[0].reshape(-1, grads[0].shape[-1])]
        grad_low = low_gradient(down, grad)
        grad_made, product, grad_factors = _through_product(
            [*into, *down], grad[0], grad_low, kept, ctx.form
        )
        down_gradients = _product_gradients(down[0], grad, product, grad_low)
        del product  # (T, f), before the weights of gate and up are decoded
        grad_low = low_gradient(into, grad_made)
        into_gradients = adapter_gradients(
            into, grad_made, restored(ctx.norm, source), kept.low, grad_low
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(into, grad_made, grad_low).view(*grads[0].shape[:-1], -1)
        return grad_x, None, None, None, *grad_factors, *into_gradients, *down_gradients


def _adapted(ctx: Any) -> tuple[list[Adapted], list[Adapted]]:
    """Return gate and up, and down, whose A is used twice: within the node it is cast once."""
    *into, down = adapted(ctx.layers, ctx.draws)
    return into, [down._replace(casts={}) if down.casts is None else down]


def _through_product(
    linears: Sequence[Adapted], grad: torch.Tensor, grad_low: torch.Tensor, kept: _Kept, form: Form
) -> tuple[Sequence[torch.Tensor], torch.Tensor, Factors]:
    """Return the gradients of gate and up, the product, and the gradients of DoRA's factors. grad:
    gradient of `down`; grad_low: of its adapter's A d(x). The product's gradient comes first, so
    that one kernel computes all; they overwrite gate and up."""
    *into, down = linears
    gates = _halves(kept.made)
    if kept.factors:
        grad_product = input_gradient([down], [grad], grad_low)
        factors = _halves(kept.factors)
        product, *made = lengthened_act_and_mul_backward_(
            grad_product, *gates, factors, form.gating
        )
        totals = zip(_joined(made[2:], kept.made), kept.factors, strict=True)
        grad_factors: Factors = [total / factor for total, factor in totals]
        return kept.made, product, grad_factors
    if _kernels_add(linears, grad, kept.factors, form):
        grad_product, adapter_part = split_input_gradient(down, grad, grad_low)
        parts = (*_part_halves(updates(into, kept.low)), adapter_part)
    else:
        grad_product = input_gradient([down], [grad], grad_low)
        parts = (no_part(gates[0]), no_part(gates[1]), no_part(grad_product))
    product, *_ = act_and_mul_backward_(grad_product, *gates, parts, form.gating)
    return kept.made, product, [None] * len(kept.made)


def _product_gradients(
    down: Adapted, grad: Sequence[torch.Tensor], product: torch.Tensor, grad_low: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of A and B of `down`. The product (T, f) may be overwritten."""
    if down.draw is not None:
        drop_(product, down.draw)
    plain = [down._replace(draw=None)]
    return adapter_gradients(plain, grad, product, low_rank(plain, product), grad_low)


def _kernels_add(linears: Sequence[Adapted], x: torch.Tensor, factors: Factors, form: Form) -> bool:
    """Whether kernels add the adapters' parts to gate and up. linears: all three; factors: DoRA's,
    or Nones."""
    if any(factor is not None for factor in factors):
        return False
    narrow = all(len(linear.a) <= WIDEST_PART for linear in linears)
    return narrow and act_and_mul.works_on(x.device, x.dtype, form.activation)
