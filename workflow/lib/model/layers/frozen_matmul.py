"""Matmuls of frozen weights: decoding, dtype, the adapter's part, the bias.

y = x W^T and the gradient g W of x are computed in the compute dtype or in 8 bits, as the model's
`MatmulPrecision` says. In the compute dtype the matmul accumulates on the adapter's part; in 8 bits
that is added afterwards, as row scales cannot add. Feed-forwards add both where they read
values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from workflow.lib.kernels.eight_bits.matmul import (
    RoundedWeight,
    Stored,
    decoded,
    eight_bit_matmul,
    row_scales,
)
from workflow.lib.kernels.eight_bits.rounding import Rounded, rounded
from workflow.lib.kernels.rows.low_rank import LowRank, add_low_rank_


class MatmulPrecision:
    """Dtype of matmuls with frozen weights: the compute dtype, or the run's in `in_eight_bits`."""

    def __init__(self, *, forward: bool = False, backward: bool = False) -> None:
        self.by_pass = forward, backward
        """Which of them are in float8 within the block."""
        self.forward = self.backward = False
        """Whether y = x W^T, and g W, are in float8 now."""

    @contextmanager
    def in_eight_bits(self) -> Iterator[None]:
        """Within the block multiply in the run's dtypes; checks and exports stay outside."""
        self.forward, self.backward = self.by_pass
        try:
            yield
        finally:
            self.forward = self.backward = False


class FrozenWeight(Protocol):
    """A linear (out, in) as its matmuls read it."""

    bias: Any
    matmul_precision: MatmulPrecision
    row_scales: torch.Tensor | None
    """Of float8, made at the first use: weights do not change."""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(out, in)."""

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return W in `dtype`."""

    def stored(self) -> Stored:
        """Return W as stored."""


Operand = torch.Tensor | Rounded


def operand(x: torch.Tensor, linear: FrozenWeight) -> Operand:
    """Return x (..., in) as rows (T, in) for forward: one operand for all linears of x."""
    rows = x.reshape(-1, x.shape[-1])
    return rounded(rows) if linear.matmul_precision.forward else rows


def adapted_matmul(
    linear: FrozenWeight, rows: Operand, update: LowRank, *, dtype: torch.dtype, bias: bool
) -> torch.Tensor:
    """Return W x + update, and + b if `bias`, (T, out) in `dtype`, of rows x (T, in)."""
    if isinstance(rows, Rounded):
        return add_low_rank_(frozen_value(linear, rows, dtype=dtype, bias=bias), update)
    if bias and linear.bias is not None:
        y = torch.addmm(linear.bias, update.low, update.small, alpha=update.scale)
    else:
        y = scaled_matmul(update.low, update.small, update.scale)
    return y.addmm_(rows, linear.dequantize(dtype).t())


def frozen_value(
    linear: FrozenWeight, rows: Operand, *, dtype: torch.dtype, bias: bool
) -> torch.Tensor:
    """Return W x, and + b if `bias`, (T, out) in `dtype`, of rows x (T, in)."""
    if isinstance(rows, Rounded):
        scales = _row_scales(linear)
        weight = decoded(linear.stored(), scales, linear.matrix_shape)
        y = eight_bit_matmul(rows, RoundedWeight(weight, scales), dtype=dtype)
        return y.add_(linear.bias) if bias and linear.bias is not None else y
    return nn.functional.linear(rows, linear.dequantize(dtype), linear.bias if bias else None)


def frozen_input_gradient(grad: torch.Tensor, linear: FrozenWeight) -> torch.Tensor:
    """Return g W (T, in) for the gradient g (T, out) of a value."""
    if not linear.matmul_precision.backward:
        return grad @ linear.dequantize(grad.dtype)
    return eight_bit_matmul(*_backward_operands(grad, linear), dtype=grad.dtype)


def add_input_gradient_(
    grad_rows: torch.Tensor, grad: torch.Tensor, linear: FrozenWeight
) -> torch.Tensor:
    """Add g W to `grad_rows` (T, in), for the gradient g (T, out) of a value; return it."""
    if not linear.matmul_precision.backward:
        return grad_rows.addmm_(grad, linear.dequantize(grad.dtype))
    return grad_rows.add_(
        eight_bit_matmul(*_backward_operands(grad, linear), dtype=grad_rows.dtype)
    )


def scaled_matmul(
    left: torch.Tensor, right: torch.Tensor, scale: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return scale * left @ right in one operation."""
    # torch has no scaled matmul without a term that is added; with beta=0 it is not even read.
    ignored = left.new_empty(())
    return torch.addmm(ignored, left, right, beta=0, alpha=scale, out=out)


def _backward_operands(grad: torch.Tensor, linear: FrozenWeight) -> tuple[Rounded, RoundedWeight]:
    """Return the operands of g W: the gradient times the rows' scales, and W / s transposed, since
    both must be contiguous along the summed dim."""
    scales = _row_scales(linear)
    left = rounded(grad, factors=scales)
    weight = decoded(linear.stored(), scales, linear.matrix_shape, transposed=True)
    return left, RoundedWeight(weight, None)


def _row_scales(linear: FrozenWeight) -> torch.Tensor:
    if linear.row_scales is None:
        linear.row_scales = row_scales(linear.stored(), linear.matrix_shape)
    return linear.row_scales


def frozen_linear(x: torch.Tensor, linear: FrozenWeight, *, bias: bool) -> torch.Tensor:
    """Return x W^T, and + b if `bias`; x: (..., in_features)."""
    multiply: Callable[..., torch.Tensor] = _FrozenLinear.apply
    return multiply(x, linear, bias)


class _FrozenLinear(torch.autograd.Function):
    """x W^T + b. Saves nothing: backward reads the weight from the module again (FSDP has gathered
    it by then). Autograd's own linear would save the decoded, or gathered, weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: FrozenWeight, bias: bool) -> torch.Tensor:
        ctx.linear = linear
        rows = operand(x, linear)
        y = frozen_value(linear, rows, dtype=x.dtype, bias=bias)
        return y.view(*x.shape[:-1], -1).detach()  # no view: a family may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grads
        grad_rows = frozen_input_gradient(grad.reshape(-1, grad.shape[-1]), ctx.linear)
        return grad_rows.view(*grad.shape[:-1], -1), None, None
