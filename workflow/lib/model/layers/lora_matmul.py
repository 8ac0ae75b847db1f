"""Matmuls of frozen weights with LoRA adapters, for linears that share their input; gradients.

y_i = f_i (W_i x + s_i B_i A_i d_i(x)) + b_i with dropout d_i (`adapter_dropout`) and DoRA's factor
f_i (`dora`, else 1). Without dropout the A of all linears are one matrix. A and B are fp32 masters,
cast to the compute dtype. Gradients are fp32, of y / f (`dora.lengthen_backward`).

The autograd nodes keep their input and the packed weight, decode the weight again in backward, and
give gradients to the input and to the adapter alone. With DoRA they also keep their value, for the
gradient of the magnitude."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from workflow.lib.kernels.rows.dropout import Draw, drop, drop_, dropped
from workflow.lib.kernels.rows.gating import LowRank, add_low_rank_, lengthen, no_part
from workflow.lib.model.layers.adapter_dropout import Casts
from workflow.lib.model.layers.dora import lengthen_backward
from workflow.lib.model.layers.frozen_linear import (
    Operand,
    adapted_matmul,
    add_input_gradient_,
    frozen_input_gradient,
    frozen_value,
    operand,
    scaled_matmul,
)
from workflow.lib.model.layers.fused_norm import keepable, restored
from workflow.lib.model.layers.split_autograd import apply_split, first_outputs
from workflow.lib.system.device_types import GPUS

# torch.mm has `out_dtype`, fp32 of 16-bit matrices, on CUDA and not on ROCm.
FLOAT32_MATMULS = torch.version.hip is None


class Adapted(NamedTuple):
    """A linear with its adapter, as one pass uses it: FSDP frees and regathers its weights."""

    base: Any  # the `FrozenLinear`
    a: torch.Tensor  # (r, in) fp32
    b: torch.Tensor  # (out, r) fp32
    scale: float  # of B A, with dropout's 1 / (1 - p)
    draw: Draw | None = None  # of the dropout of the adapter's input
    casts: Casts | None = None  # cache of casts of A and B; None: no cache


Draws = Sequence[Draw | None]


def draws_of(layers: Iterable[Any]) -> list[Draw | None]:
    """Return the dropout draws of PEFT layers in this pass; backward needs the same ones."""
    return [layer.fused_draw() for layer in layers]


def adapted(layers: Iterable[Any], draws: Draws) -> list[Adapted]:
    """Read the weights of PEFT layers (`lora_linear.FusedLoraLinear`)."""
    linears = []
    for layer, draw in zip(layers, draws, strict=True):
        scale = layer.fused_scale() * (draw.scale if draw else 1.0)
        a_weight, b_weight = layer.fused_weights()
        base, casts = layer.get_base_layer(), layer.shared.casts()
        linears.append(Adapted(base, a_weight, b_weight, scale, draw, casts))
    return linears


def low_rank(linears: Sequence[Adapted], rows: torch.Tensor) -> torch.Tensor:
    """Return A_i d_i(x) of all linears side by side, (T, sum of ranks), for rows (T, in)."""
    if not _drops(linears):
        return rows @ _cast([linear.a for linear in linears], linears[0], rows.dtype).t()
    low = rows.new_empty(rows.shape[0], sum(linear.a.shape[0] for linear in linears))
    for linear, part in zip(linears, _parts(linears, low), strict=True):
        torch.mm(_input(linear, rows), _cast([linear.a], linear, rows.dtype).t(), out=part)
    return low


def value(linear: Adapted, x: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return W x + s B low + b (T, out) of x (..., in), for low = A d(x) (T, r)."""
    return _value(linear, operand(x, linear.base), low, dtype=x.dtype, bias=True)


def _value(
    linear: Adapted, rows: Operand, low: torch.Tensor, *, dtype: torch.dtype, bias: bool
) -> torch.Tensor:
    update = _update(linear, low)
    return adapted_matmul(linear.base, rows, update, dtype=dtype, bias=bias)


def _update(linear: Adapted, low: torch.Tensor) -> LowRank:
    """Return the adapter's part of a value, for low = A d(x) (T, r)."""
    return LowRank(low, _cast([linear.b], linear, low.dtype).t(), linear.scale)


def updates(linears: Sequence[Adapted], low: torch.Tensor) -> list[LowRank]:
    """Return the adapters' parts of the values, for `low_rank` (T, sum of ranks)."""
    parts = _parts(linears, low)
    return [_update(linear, part) for linear, part in zip(linears, parts, strict=True)]


def frozen_values(linears: Sequence[Adapted], x: torch.Tensor) -> list[torch.Tensor]:
    """Return W x + b (T, out) of every linear for x (..., in), without the adapters' parts."""
    shared = operand(x, linears[0].base)
    return [frozen_value(y.base, shared, dtype=x.dtype, bias=True) for y in linears]


def values(
    linears: Sequence[Adapted],
    x: torch.Tensor,
    low: torch.Tensor,
    factors: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Return y (T, out) of every linear for x (..., in); with a DoRA factor without bias."""
    made, shared = [], operand(x, linears[0].base)
    for linear, part, factor in zip(linears, _parts(linears, low), factors, strict=True):
        y = _value(linear, shared, part, dtype=x.dtype, bias=factor is None)
        made.append(y if factor is None else lengthen(y, y, factor))
    return made


def low_gradient(linears: Sequence[Adapted], grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of `low_rank` (T, sum of ranks) from the values' gradients (T, out)."""
    if len(linears) == 1:
        small = _cast([linears[0].b], linears[0], grads[0].dtype)
        return scaled_matmul(grads[0], small, linears[0].scale)
    grad_low = grads[0].new_empty(grads[0].shape[0], sum(linear.a.shape[0] for linear in linears))
    for linear, grad, part in zip(linears, grads, _parts(linears, grad_low), strict=True):
        scaled_matmul(grad, _cast([linear.b], linear, grad.dtype), linear.scale, out=part)
    return grad_low


def input_gradient(
    linears: Sequence[Adapted], grads: Sequence[torch.Tensor], grad_low: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the rows (T, in) from the gradients of the values and of
    `low_rank`."""
    if linears[0].base.matmul_precision.backward and not _drops(linears):
        return _matmuls_first(linears, grads, grad_low)
    grad_rows = _adapters_input_gradient(linears, grad_low)
    for linear, grad in zip(linears, grads, strict=True):
        add_input_gradient_(grad_rows, grad, linear.base)
    return grad_rows


def _matmuls_first(
    linears: Sequence[Adapted], grads: Sequence[torch.Tensor], grad_low: torch.Tensor
) -> torch.Tensor:
    """The same by matmuls that cannot accumulate: the last is added with the adapters' part."""
    small = _cast([linear.a for linear in linears], linears[0], grad_low.dtype)
    (first, grad), *others = zip(linears, grads, strict=True)
    grad_rows = frozen_input_gradient(grad, first.base)
    for linear, grad in others[:-1]:
        add_input_gradient_(grad_rows, grad, linear.base)
    last = None
    if others:
        linear, grad = others[-1]
        last = frozen_input_gradient(grad, linear.base)
    return add_low_rank_(grad_rows, LowRank(grad_low, small, 1.0), last)


def split_input_gradient(
    linear: Adapted, grad: torch.Tensor, grad_low: torch.Tensor
) -> tuple[torch.Tensor, LowRank]:
    """Return the gradient of one linear's rows (T, in), and the part still to be added to it."""
    if linear.draw is not None:
        grad_rows = input_gradient([linear], [grad], grad_low)
        return grad_rows, no_part(grad_rows)
    small = _cast([linear.a], linear, grad_low.dtype)
    return frozen_input_gradient(grad, linear.base), LowRank(grad_low, small, 1.0)


def _adapters_input_gradient(linears: Sequence[Adapted], grad_low: torch.Tensor) -> torch.Tensor:
    """Return the part of the rows' gradient that comes through A."""
    if not _drops(linears):
        return grad_low @ _cast([linear.a for linear in linears], linears[0], grad_low.dtype)
    grad_rows = None
    for linear, part in zip(linears, _parts(linears, grad_low), strict=True):
        update = part @ _cast([linear.a], linear, grad_low.dtype)
        assert linear.draw is not None
        if grad_rows is None:
            grad_rows = drop_(update, linear.draw)
        else:
            drop(grad_rows, update, linear.draw, True)
    assert grad_rows is not None
    return grad_rows


def adapter_gradients(
    linears: Sequence[Adapted],
    grads: Sequence[torch.Tensor],
    rows: torch.Tensor,
    low: torch.Tensor,
    grad_low: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the gradients of A and B of every linear, in this order, fp32."""
    if _drops(linears):
        grads_a = [
            _float32_matmul(part.t(), _input(linear, rows))
            for linear, part in zip(linears, _parts(linears, grad_low), strict=True)
        ]
    else:
        grads_a = [*_float32_matmul(grad_low.t(), rows).split([x.a.shape[0] for x in linears])]
    gradients = []
    for linear, grad, part, a in zip(linears, grads, _parts(linears, low), grads_a, strict=True):
        gradients += [a, _float32_matmul(grad.t(), part).mul_(linear.scale)]
    return gradients


def _drops(linears: Sequence[Adapted]) -> bool:
    """Whether adapters have inputs of their own; dropout is set for all linears or for none."""
    return linears[0].draw is not None


def _input(linear: Adapted, rows: torch.Tensor) -> torch.Tensor:
    """Return the adapter's input d(x) (T, in), not rescaled."""
    return rows if linear.draw is None else dropped(rows, linear.draw)


def _parts(linears: Sequence[Adapted], low: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the columns (T, r) of each linear."""
    columns: tuple[torch.Tensor, ...] = low.split([linear.a.shape[0] for linear in linears], dim=1)
    return columns


def _cast(weights: list[torch.Tensor], of: Adapted, dtype: torch.dtype) -> torch.Tensor:
    """Return stacked masters in the compute dtype; from the casts that `of` keeps, if any."""
    key = (dtype, *map(id, weights))
    if of.casts is not None and key in of.casts:
        return of.casts[key]
    cast = (weights[0] if len(weights) == 1 else torch.cat(weights)).to(dtype)
    if of.casts is not None:
        of.casts[key] = cast
    return cast


def _float32_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right in fp32, on a GPU without rounding to the inputs' type in between."""
    if left.device.type in GPUS and left.dtype != torch.float32 and FLOAT32_MATMULS:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


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
    in_features), by one node. draws: of the masks; None: of this pass."""
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
