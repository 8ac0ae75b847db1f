"""Rounding of activations and gradients to float8, and back: values with a scale for each token, or
for blocks of its columns. A GPU has kernels, which give the same bits as torch's operations."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from workflow.lib.kernels.launch import WARPS, launch, power_of_two
from workflow.lib.kernels.op import Case, Op, first_tensor
from workflow.lib.system.device_types import GPUS
from workflow.lib.system.errors import UserError

SMALLEST_SCALE = 1e-30  # of a row of zeros, in place of 0
# Of a row that a program has at a time; up to WHOLE_ROW elements it has the row in registers.
ROW_ELEMENTS, ROW_WARPS, WHOLE_ROW = 2048, 8, 32768
THREAD_ELEMENTS = 32  # of such a row
BLOCKS_ELEMENTS = 4096  # the same, of a row in blocks


class Format(NamedTuple):
    """A type of 8 bits, and how activations are rounded to it."""

    name: str
    dtype: torch.dtype
    largest: float
    block: int | None  # columns that share a scale, of saved activations; None: all of a token's


FORMATS = {"float8": Format("float8", torch.float8_e4m3fn, 448.0, None)}


class Rounded(NamedTuple):
    """Activations or gradients in 8 bits."""

    values: torch.Tensor  # (T, width)
    scales: torch.Tensor  # (T, blocks) fp32
    form: Format


def unfilled(size: Sequence[int], form: Format, device: torch.device) -> Rounded:
    """Return a copy of rows of this size (T, width), whose values and scales are to be written."""
    num_rows, width = size
    num_blocks = 1 if form.block is None else -(-width // form.block)
    values = torch.empty((num_rows, width), dtype=form.dtype, device=device)
    scales = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    return Rounded(values, scales, form)


def by_kernel_on_gpus(op: Op[Any, Any], *given: Any) -> Any:
    """Compute by torch's operations on CPUs alone: on a GPU they take more memory than is planned.
    Raises `UserError` on a GPU that cannot use the kernel."""
    if not op.takes_kernel(*given) and first_tensor(given).device.type in GPUS:
        raise UserError(
            "train.matmul_dtype, train.saved_activations: float8 on a GPU needs the kernel for "
            f"{op.name}, which cannot be used here (see the log). Install Triton with a C "
            "compiler, or set both to compute_dtype."
        )
    return op(*given)


def rounded(
    rows: torch.Tensor,
    form: Format,
    *,
    factors: torch.Tensor | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Rounded:
    """Return rows (T, width), times `factors` (width,) fp32 of their columns, in 8 bits. A row or
    block with NaN or infinity has the scale infinity: matmuls with it are not finite. into: values
    and scales to fill; None: new ones."""
    values, scales = into or unfilled(rows.shape, form, rows.device)[:2]
    by_kernel_on_gpus(round_rows, values, scales, rows, factors, form)
    return Rounded(values, scales, form)


def _round_by_kernel(
    values: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    factors: torch.Tensor | None,
    form: Format,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows.contiguous()
    num_rows, width = rows.shape
    given = (scales, rows, rows if factors is None else factors, width)
    options: dict[str, Any] = {"most": form.largest, "folds": factors is not None}
    if form.block is None:
        program = _row_program(width)
        launch("eight_bits.round_rows", (num_rows,), values, *given, **program, **options)
    else:
        num_blocks = scales.shape[1]
        blocks = min(BLOCKS_ELEMENTS // form.block, power_of_two(num_blocks))
        launch(
            "eight_bits.round_blocks", (num_rows, -(-num_blocks // blocks)), values, *given,
            num_blocks, block_size=form.block, blocks=blocks, num_warps=WARPS, **options,
        )  # fmt: skip
    return values, scales


def _round_by_torch(
    values: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    factors: torch.Tensor | None,
    form: Format,
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = rows.float() if factors is None else rows.float() * factors
    blocks = exact.split(form.block or exact.shape[1], dim=1)
    infinite = {"nan": torch.inf, "posinf": torch.inf}
    largest = torch.stack([x.abs().nan_to_num(**infinite).amax(dim=1) for x in blocks], dim=1)
    scales.copy_((largest / form.largest).clamp_min(SMALLEST_SCALE))
    inverses = scales.reciprocal().unbind(1)
    scaled = [block * inverse[:, None] for block, inverse in zip(blocks, inverses, strict=True)]
    return values.copy_(torch.cat(scaled, dim=1).to(form.dtype)), scales


def _row_program(width: int) -> dict[str, Any]:
    """Return how a program of one row has its elements."""
    size = power_of_two(width)
    if size > WHOLE_ROW:
        return {"whole": False, "size": ROW_ELEMENTS, "num_warps": ROW_WARPS}
    return {
        "whole": True,
        "size": size,
        "num_warps": min(32, max(4, size // 32 // THREAD_ELEMENTS)),
    }


def _case_of_rows(device: torch.device, dtype: torch.dtype, block: int | None) -> Case:
    draw = torch.Generator().manual_seed(0)
    rows, factors = (torch.randn(x, generator=draw).to(device) for x in ((5, 192), (192,)))
    form = FORMATS["float8"]._replace(dtype=dtype, block=block)
    return *unfilled(rows.shape, form, device)[:2], rows, factors, form


round_rows = Op(
    "rounding to float8",
    reference=_round_by_torch,
    kernel=_round_by_kernel,
    case=_case_of_rows,
    variant=lambda values, *args: (values.dtype, args[-1].block),
)
"""Fills values and scales with `rows`, and returns them."""


def restored(copy: Rounded, *, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows (T, width) of a copy with block scales, in `dtype`; not finite: NaN."""
    assert copy.form.block is not None, "rows with one scale are multiplied and never restored"
    restored_rows: torch.Tensor = by_kernel_on_gpus(restore_rows, *copy[:2], copy.form.block, dtype)
    return restored_rows


def _restore_by_kernel(
    values: torch.Tensor, scales: torch.Tensor, block: int, dtype: torch.dtype
) -> torch.Tensor:
    num_rows, width = values.shape
    num_blocks = scales.shape[1]
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    blocks = min(BLOCKS_ELEMENTS // block, power_of_two(num_blocks))
    launch(
        "eight_bits.restore_blocks", (num_rows, -(-num_blocks // blocks)), out, values, scales,
        width, num_blocks, block_size=block, blocks=blocks, num_warps=WARPS,
    )  # fmt: skip
    return out


def _restore_by_torch(
    values: torch.Tensor, scales: torch.Tensor, block: int, dtype: torch.dtype
) -> torch.Tensor:
    widths = scales.repeat_interleave(block, dim=1)[:, : values.shape[1]]
    return (values.float() * widths).to(dtype)


def _case_of_blocks(device: torch.device, dtype: torch.dtype) -> Case:
    values, scales, *given = _case_of_rows(device, torch.float32, 128)
    return *_round_by_torch(values, scales, *given), 128, dtype


restore_rows = Op(
    "restoring from float8",
    reference=_restore_by_torch,
    kernel=_restore_by_kernel,
    case=_case_of_blocks,
    variant=lambda *args: (args[-1],),
)
