"""Rounding of activations and gradients to float8, with a scale for each token. A GPU's kernels
give the same bits as torch's operations."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from workflow.lib.kernels.kernel_launch import launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn, first_tensor
from workflow.lib.system.device_types import GPUS
from workflow.lib.system.errors import UserError

FLOAT8, LARGEST = torch.float8_e4m3fn, 448.0  # the format, and its largest value
SMALLEST_SCALE = 1e-30  # of a row of zeros
# Elements of a row in a program at a time; up to WHOLE_ROW all of them are in registers.
ROW_ELEMENTS, ROW_WARPS, WHOLE_ROW = 2048, 8, 32768
THREAD_ELEMENTS = 32  # of such a row


class Rounded(NamedTuple):
    """Activations or gradients in 8 bits."""

    values: torch.Tensor  # (T, width)
    scales: torch.Tensor  # (T, 1) fp32


def unfilled(size: Sequence[int], device: torch.device, *, dtype: torch.dtype = FLOAT8) -> Rounded:
    """Return unfilled values and scales of rows of this size (T, width)."""
    values = torch.empty(size, dtype=dtype, device=device)
    return Rounded(values, torch.empty((size[0], 1), dtype=torch.float32, device=device))


def by_kernel_on_gpus(op: Op[Any, Any], *inputs: Any) -> Any:
    """Compute by torch's operations on CPUs alone: on a GPU they exceed the planned memory. Raises
    `UserError` on a GPU that cannot use the kernel."""
    if not op.takes_kernel(*inputs) and first_tensor(inputs).device.type in GPUS:
        raise UserError(
            f"train.matmul_dtype: float8 on a GPU needs the kernel for {op.name}, which cannot be "
            "used here (see the log). Install Triton with a C compiler, or set it to compute_dtype."
        )
    return op(*inputs)


def rounded(rows: torch.Tensor, *, factors: torch.Tensor | None = None) -> Rounded:
    """Return rows (T, width), times `factors` (width,) fp32 of their columns, in 8 bits. A row with
    NaN or infinity has the scale infinity: matmuls with it are not finite."""
    made = unfilled(rows.shape, rows.device)
    by_kernel_on_gpus(round_rows, *made, rows, factors)
    return made


def _round_by_kernel(
    values: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    factors: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows.contiguous()
    num_rows, width = rows.shape
    inputs = (scales, rows, rows if factors is None else factors, width)
    options: dict[str, Any] = {"most": LARGEST, "folds": factors is not None}
    launch("eight_bits.round_rows", (num_rows,), values, *inputs, **_row_program(width), **options)
    return values, scales


def _round_by_torch(
    values: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    factors: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = rows.float() if factors is None else rows.float() * factors
    largest = exact.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(dim=1, keepdim=True)
    scales.copy_((largest / LARGEST).clamp_min(SMALLEST_SCALE))
    return values.copy_(exact * scales.reciprocal()), scales


def _row_program(width: int) -> dict[str, Any]:
    """Return the sizes of a program for one row."""
    size = power_of_two(width)
    if size > WHOLE_ROW:
        return {"whole": False, "size": ROW_ELEMENTS, "num_warps": ROW_WARPS}
    return {
        "whole": True,
        "size": size,
        "num_warps": min(32, max(4, size // 32 // THREAD_ELEMENTS)),
    }


def _case_of_rows(device: torch.device, dtype: torch.dtype) -> Case:
    rows, factors = drawn(device, torch.float32, (5, 192), (192,))
    return *unfilled(rows.shape, device, dtype=dtype), rows, factors


round_rows = Op(
    "rounding to float8", reference=_round_by_torch, kernel=_round_by_kernel, case=_case_of_rows
)
"""Fills values and scales with `rows`, and returns them."""
