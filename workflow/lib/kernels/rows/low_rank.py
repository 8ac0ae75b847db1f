"""Matmuls of low rank, the adapters' parts, added by the kernel that reads the values.

A matmul with a frozen weight in 8 bits cannot accumulate, so an adapter's part would need a pass of
its own over the value: for a feed-forward's wide values as much memory traffic as all later
operations."""

from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from workflow.lib.kernels.kernel_launch import WARPS, launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn

ROWS, COLUMNS = 16, 128  # of a program: the fastest of 7 tried on an H100, rank 16
CHUNK = 64  # of a rank, that is multiplied at a time


class LowRank(NamedTuple):
    """An adapter's part of a value: scale * low @ small."""

    low: torch.Tensor  # (T, r), its rows contiguous
    small: torch.Tensor  # (r, out)
    scale: float

    @property
    def rank(self) -> int:
        return self.low.shape[1]


def no_part(value: torch.Tensor) -> LowRank:
    """Return a part of rank 0, which adds nothing to `value` (T, width)."""
    return LowRank(value[:, :0], value[:0], 0.0)


def launch_with_parts(
    kernel: str,
    out: torch.Tensor,
    *others: torch.Tensor | float,
    parts: list[LowRank],
    **options: Any,
) -> None:
    """Start a kernel on tiles of `out` (T, width), contiguous; others: more such, and numbers."""
    num_rows, width = out.shape
    arguments: list[Any] = []
    for low, small, scale in parts:
        assert low.stride(1) == 1, "the kernel reads rows of low one after the other"
        arguments += [low, small, scale, low.stride(0), *small.stride()]
    rank = max(part.rank for part in parts)
    launch(
        kernel, (-(-num_rows // ROWS) * -(-width // COLUMNS),), out, *others, *arguments, num_rows,
        width, rows=ROWS, columns=COLUMNS, chunk=min(CHUNK, max(16, power_of_two(rank))),
        num_warps=WARPS, **options,
    )  # fmt: skip


def _add_by_kernel_(
    total: torch.Tensor, part: LowRank, other: torch.Tensor | None = None
) -> torch.Tensor:
    launch_with_parts(
        "low_rank.add_low_rank", total, total if other is None else other, parts=[part],
        rank=part.rank, adds_other=other is not None,
    )  # fmt: skip
    increment_version((total,))
    return total


def add_by_torch_(
    total: torch.Tensor, part: LowRank, other: torch.Tensor | None = None
) -> torch.Tensor:
    """Add scale * low @ small, and `other`, to `total` (T, features) in place."""
    if other is not None:
        total.add_(other)
    return total.addmm_(part.low, part.small, alpha=part.scale)


def case_values(
    device: torch.device, dtype: torch.dtype, *, values: int, parts: int
) -> tuple[list[torch.Tensor], list[LowRank]]:
    """Return so many values (5, 40) of a case, and so many parts of such."""
    made = drawn(device, dtype, *[(5, 40)] * values, *[(5, 3), (3, 40)] * parts)
    pairs = zip(made[values::2], made[values + 1 :: 2], strict=True)
    return made[:values], [LowRank(low, small, 0.3) for low, small in pairs]


def _case_of_sum(device: torch.device, dtype: torch.dtype) -> Case:
    (total, other), (part,) = case_values(device, dtype, values=2, parts=1)
    return total, part, other


add_low_rank_ = Op(
    "adapters' parts", reference=add_by_torch_, kernel=_add_by_kernel_, case=_case_of_sum
)
"""Adds the part, and `other` if there is one, to `total` (T, width); returns it."""
