"""Gradients of a weight's rows with their own lengths (DoRA, arXiv 2402.09353): of values, which
are directions times `factor` (width,) fp32, and of the factors."""

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from workflow.lib.kernels.kernel_launch import WARPS, launch
from workflow.lib.kernels.op import Case, Op
from workflow.lib.kernels.rows.gating import Gating, row_distance

COLUMNS, ROWS = 256, 64  # of a program that sums over rows
GRADIENT_CHUNKS = 8  # of rows, one fp32 matmul each, summed for a factor's gradient


def summed_products(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of grad times y (..., out), in fp32."""
    total = torch.zeros(y.shape[-1], device=y.device)
    rows = (x.flatten(0, -2).chunk(GRADIENT_CHUNKS) for x in (grad, y))
    for factor_rows, part in zip(*rows, strict=True):
        total += factor_rows.to(torch.float32, copy=True).mul_(part).sum(dim=0)
    return total


def _by_kernel(
    grad: torch.Tensor, y: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad = grad.contiguous()
    width = y.shape[-1]
    num_rows = y.numel() // width
    grid = (-(-width // COLUMNS), -(-num_rows // ROWS))
    sums = torch.empty((grid[1], width), dtype=torch.float32, device=y.device)
    scaled = torch.empty_like(grad)
    launch(
        "elementwise.lengthen_backward", grid, sums, scaled, grad, y, factor, num_rows, width,
        rows=ROWS, columns=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return scaled, sums.sum(dim=0)


def _by_torch(
    grad: torch.Tensor, y: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = summed_products(grad, y)
    return torch.mul(grad, factor, out=torch.empty_like(grad)), sums


def _drawn(count: int, device: torch.device, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Return `count` tensors of values, and two factors."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(count, 5, 40, generator=draw).to(device, dtype)
    factors = torch.rand(2, 40, generator=draw).to(device) + 0.5
    return [*(x.clone() for x in values), *factors]


def _case(device: torch.device, dtype: torch.dtype) -> Case:
    grad, y, factor, _ = _drawn(2, device, dtype)
    return grad, y, factor


lengthen_backward = Op(
    "gradients of row lengths", reference=_by_torch, kernel=_by_kernel, case=_case
)
"""Returns grad times the factor, and the sum over rows of grad times y (..., width)."""


def _gated_by_kernel_(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    factors: Sequence[torch.Tensor],
    gating: Gating,
) -> tuple[torch.Tensor, ...]:
    num_rows, width = gate.shape
    grid = (-(-width // COLUMNS), -(-num_rows // ROWS))
    sums = torch.empty((2, grid[1], width), dtype=torch.float32, device=gate.device)
    launch(
        "elementwise.lengthened_act_and_mul_backward", grid, sums, grad, gate, up,
        row_distance(gate, up), gating.multiplier, *factors, num_rows, width,
        kind=gating.activation, rows=ROWS, columns=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    increment_version((grad, gate, up))
    return grad, gate, up, *sums.sum(dim=1)


def _gated_by_torch_(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    factors: Sequence[torch.Tensor],
    gating: Gating,
) -> tuple[torch.Tensor, ...]:
    product, *parts = gating.gradients(grad, gate, up)
    sums = [summed_products(part, y) for part, y in zip(parts, (gate, up), strict=True)]
    grad_gate, grad_up = (part.mul_(factor) for part, factor in zip(parts, factors, strict=True))
    return grad.copy_(product), gate.copy_(grad_gate), up.copy_(grad_up), *sums


def _case_of_gate(device: torch.device, dtype: torch.dtype, activation: str) -> Case:
    grad, gate, up, *factors = _drawn(3, device, dtype)
    return grad, gate, up, factors, Gating(activation, 0.7)


lengthened_act_and_mul_backward_ = Op(
    "gradients of gates with row lengths",
    reference=_gated_by_torch_,
    kernel=_gated_by_kernel_,
    case=_case_of_gate,
    variant=lambda grad, *args: (grad.dtype, args[-1].activation),
)
"""In place, for `grad`, the gradient of `gating` of `gate` and `up` (T, f), which are directions
times `factors`: they become the gradients of the directions, `grad` the product. Returns the three,
and the sums over rows (f,) fp32 of gate and of up times their gradients. gate, up: rows of one
distance, such as halves of a value."""
