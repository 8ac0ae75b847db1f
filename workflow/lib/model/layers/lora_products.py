"""Products of frozen NF4 weights with LoRA adapters on top, of linears that share their input, and
their gradients.

y_i = W_i x + b_i + s_i B_i A_i x. The A of all linears are one matrix, so x is read once for all
adapters. An adapter's part is made first and the frozen product is added to it by the matrix
product itself: one pass over y less, and the small part is rounded to the compute type where the
large one would be. A and B are fp32 masters, cast to the compute type; their gradients are made in
fp32.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

# torch.mm has `out_dtype`, fp32 of 16-bit matrices, on CUDA and not on ROCm.
FLOAT32_PRODUCTS = torch.version.hip is None


class Adapted(NamedTuple):
    """A linear with its adapter, as one pass uses it: FSDP frees and regathers its weights."""

    base: Any
    """The `NF4Linear`."""
    a: torch.Tensor
    """(r, in) fp32."""
    b: torch.Tensor
    """(out, r) fp32."""
    scale: float


def adapted(layers: Iterable[Any]) -> list[Adapted]:
    """Read the weights of PEFT layers: they have `get_base_layer()`, `fused_weights()` and
    `fused_scale()`.
    """
    linears = []
    for layer in layers:
        a_weight, b_weight = layer.fused_weights()
        linears.append(Adapted(layer.get_base_layer(), a_weight, b_weight, layer.fused_scale()))
    return linears


def low_rank(linears: Sequence[Adapted], rows: torch.Tensor) -> torch.Tensor:
    """Return A_i x of all linears side by side, (T, sum of ranks), for rows (T, in)."""
    return rows @ _stacked(linears, rows.dtype).t()


def value(linear: Adapted, rows: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return y (T, out) of rows (T, in), for low = A x (T, r)."""
    small, bias = linear.b.to(rows.dtype).t(), linear.base.bias
    if bias is None:
        y = _scaled_product(low, small, linear.scale)
    else:
        y = torch.addmm(bias, low, small, alpha=linear.scale)
    return y.addmm_(rows, linear.base.dequantize(rows.dtype).t())


def values(linears: Sequence[Adapted], rows: torch.Tensor, low: torch.Tensor) -> list[torch.Tensor]:
    """Return y of every linear."""
    return [
        value(linear, rows, part)
        for linear, part in zip(linears, _parts(linears, low), strict=True)
    ]


def low_gradient(linears: Sequence[Adapted], grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of `low_rank` (T, sum of ranks) for those of the values (T, out)."""
    if len(linears) == 1:
        return _scaled_product(grads[0], linears[0].b.to(grads[0].dtype), linears[0].scale)
    of_low = grads[0].new_empty(grads[0].shape[0], sum(linear.a.shape[0] for linear in linears))
    for linear, grad, part in zip(linears, grads, _parts(linears, of_low), strict=True):
        _scaled_product(grad, linear.b.to(grad.dtype), linear.scale, out=part)
    return of_low


def input_gradient(
    linears: Sequence[Adapted], grads: Sequence[torch.Tensor], of_low: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the rows (T, in) for those of the values and of `low_rank`."""
    of_rows = of_low @ _stacked(linears, of_low.dtype)
    for linear, grad in zip(linears, grads, strict=True):
        of_rows.addmm_(grad, linear.base.dequantize(grad.dtype))
    return of_rows


def adapter_gradients(
    linears: Sequence[Adapted],
    grads: Sequence[torch.Tensor],
    rows: torch.Tensor,
    low: torch.Tensor,
    of_low: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the gradients of A and B of every linear, in this order, fp32."""
    of_a = _float32_product(of_low.t(), rows).split([linear.a.shape[0] for linear in linears])
    gradients = []
    for linear, grad, part, a in zip(linears, grads, _parts(linears, low), of_a, strict=True):
        gradients += [a, _float32_product(grad.t(), part).mul_(linear.scale)]
    return gradients


def _parts(linears: Sequence[Adapted], low: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the columns (T, r) of each linear."""
    columns: tuple[torch.Tensor, ...] = low.split([linear.a.shape[0] for linear in linears], dim=1)
    return columns


def _stacked(linears: Sequence[Adapted], dtype: torch.dtype) -> torch.Tensor:
    """Return A of all linears one below the other, (sum of ranks, in), in the compute type."""
    weights = [linear.a for linear in linears]
    return (weights[0] if len(weights) == 1 else torch.cat(weights)).to(dtype)


def _scaled_product(
    left: torch.Tensor, right: torch.Tensor, scale: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return scale * left @ right in one operation."""
    # torch has no scaled product without a term that is added; with beta=0 it is not even read.
    ignored = left.new_empty(())
    return torch.addmm(ignored, left, right, beta=0, alpha=scale, out=out)


def _float32_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right in fp32, on a GPU without rounding to the inputs' type in between.

    For the gradients of adapters, which are sums over all tokens.
    """
    if left.is_cuda and left.dtype != torch.float32 and FLOAT32_PRODUCTS:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()
