"""Products of low rank, the adapters' parts, added by the kernel that reads what they are added to.

A product of a frozen weight in 8 bits cannot add to what is there, so an adapter's part needs a
pass of its own over the value: for the wide values of a feed-forward as much memory as all that
follows. Values are computed in fp32 and rounded once.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.system.device_types import RECORDED

ROWS, COLUMNS, WARPS = 16, 128, 4  # of a program: the fastest of 7 tried on an H100, rank 16
CHUNK = 64  # of a rank, that is multiplied at a time

if kernels.INSTALLED:
    from workflow.lib.kernels.triton_code import low_rank as low_rank_code


class LowRank(NamedTuple):
    """An adapter's part of a value: scale * low @ small."""

    low: torch.Tensor
    """(T, r), its rows contiguous."""
    small: torch.Tensor
    """(r, out)."""
    scale: float

    @property
    def rank(self) -> int:
        return self.low.shape[1]


def _launch(
    name: str,
    out: torch.Tensor,
    *others: torch.Tensor | float,
    parts: list[LowRank],
    **options: Any,
) -> None:
    """Start a kernel on tiles of `out` (T, width), contiguous. others: more of this shape, and
    numbers that the kernel asks for.

    A device that is recorded computes nothing.
    """
    if out.device.type == RECORDED:
        return
    num_rows, width = out.shape
    arguments: list[Any] = []
    for low, small, scale in parts:
        assert low.stride(1) == 1, "the kernel reads rows of low one after the other"
        arguments += [low, small, scale, low.stride(0), *small.stride()]
    grid = (-(-num_rows // ROWS) * -(-width // COLUMNS),)
    rank = max(part.rank for part in parts)
    getattr(low_rank_code, name)[grid](
        out, *others, *arguments, num_rows, width, rows=ROWS, columns=COLUMNS,
        chunk=min(CHUNK, max(16, kernels.power_of_two(rank))), num_warps=WARPS, **options,
    )  # fmt: skip


def add_low_rank_(
    total: torch.Tensor, part: LowRank, other: torch.Tensor | None = None
) -> torch.Tensor:
    """Add the part, and `other` if there is one, to `total` (T, width); return it."""
    if not kernels.usable(total.device):
        if other is not None:
            total.add_(other)
        return total.addmm_(part.low, part.small, alpha=part.scale)
    _launch(
        "add_low_rank", total, total if other is None else other, parts=[part],
        rank=part.rank, adds_other=other is not None,
    )  # fmt: skip
    increment_version((total,))
    return total


def no_part(value: torch.Tensor) -> LowRank:
    """Return a part of rank 0, which adds nothing to `value` (T, width)."""
    return LowRank(value[:, :0], value[:0], 0.0)


def _row_distance(gate: torch.Tensor, up: torch.Tensor) -> int:
    """Return how many elements lie between the starts of two rows."""
    assert gate.stride() == up.stride(), "the kernel knows one distance of rows for both"
    assert gate.stride(1) == 1, "the kernel reads columns one after the other"
    return gate.stride(0)


def act_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_part: LowRank,
    up_part: LowRank,
    *,
    activation: str,
    multiplier: float = 1.0,
) -> torch.Tensor:
    """Return act(multiplier * gate) * up (T, f), of gate and up with their parts. activation:
    `silu` or `gelu_tanh`. gate, up: rows of one distance, as halves of a value have them.
    """
    product = gate.new_empty(gate.shape)
    _launch(
        "act_and_mul", product, gate, up, _row_distance(gate, up), multiplier,
        parts=[gate_part, up_part],
        gate_rank=gate_part.rank, up_rank=up_part.rank, kind=activation,
    )  # fmt: skip
    return product


def act_and_mul_backward_(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    parts: tuple[LowRank, LowRank, LowRank],
    *,
    activation: str,
    multiplier: float = 1.0,
) -> None:
    """In place, for the gradient `grad` of `act_and_mul`: `gate` and `up` become their gradients,
    `grad` the product itself. parts: what is still to be added to gate, up, and grad.
    """
    of_gate, of_up, of_grad = parts
    _launch(
        "act_and_mul_backward", grad, gate, up, _row_distance(gate, up), multiplier,
        parts=[*parts],
        gate_rank=of_gate.rank, up_rank=of_up.rank, grad_rank=of_grad.rank, kind=activation,
    )  # fmt: skip
    # Autograd does not see what Triton writes. With a new version it refuses a second backward,
    # which would take the gradients in `gate` and `up` for what forward saved.
    increment_version((grad, gate, up))
