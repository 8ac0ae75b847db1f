"""Products of low rank, the adapters' parts, added by the kernel that reads what they are added to.

A product of a frozen weight in 8 bits cannot add to what is there, so an adapter's part needs a
pass of its own over the value: for the wide values of a feed-forward as much memory as all that
follows. Values are computed in fp32 and rounded once.

What an adapter takes of such a value is of low rank, too: a sum over its columns. The kernel that
makes the value has it in registers, and adds up what it has (`Taker`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from workflow.lib.model.layers import kernels
from workflow.lib.system.device_types import RECORDED

ROWS, COLUMNS, WARPS = 16, 128, 4  # of a program: the fastest of 7 tried on an H100, rank 16
CHUNK = 64  # of a rank, that is multiplied at a time
TILES = 4  # of columns, of a program that sums over them
MOST_RANKS = 64  # of such sums: more would take a program's registers
SUMMED_ROWS = 32  # of a program that adds up the sums of all columns

if kernels.INSTALLED:
    from workflow.lib.model.layers.fused_kernels import low_rank_code


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


class Taker(NamedTuple):
    """What takes a value: scale * value @ small^T is to be written."""

    small: torch.Tensor
    """(r, width)."""
    scale: float
    out: torch.Tensor
    """(T, r), its rows contiguous."""

    @property
    def rank(self) -> int:
        return self.small.shape[0]


def takes_sums(ranks: Iterable[int]) -> bool:
    """Whether the kernels make the sums that adapters of these ranks take."""
    return max(ranks) <= MOST_RANKS


class _Sums:
    """The sums over parts of the columns that a kernel writes for takers; without takers none."""

    def __init__(self, takers: Sequence[Taker], like: torch.Tensor, *, count: int) -> None:
        """like: (T, width), the values; count: of takers that the kernel can have."""
        self._takers, (self._num_rows, width) = takers, like.shape
        self.tiles = TILES if takers else 1
        self._parts = -(-width // (COLUMNS * self.tiles))
        made = (self._parts, self._num_rows)
        self._sums = [like.new_empty(*made, x.rank, dtype=torch.float32) for x in takers]
        missing = count - len(takers)
        self.ranks = [x.rank for x in takers] + [0] * missing
        self.size = max(16, kernels.power_of_two(max(*self.ranks, 1)))
        self.arguments: list[Any] = []
        for taker, sums in zip(takers, self._sums, strict=True):
            self.arguments += [sums, taker.small, *taker.small.stride()]
        self.arguments += [like, like, 0, 0] * missing  # pointers that are not used

    def add_up(self) -> None:
        """Write what the takers take."""
        for taker, sums in zip(self._takers, self._sums, strict=True):
            assert taker.out.stride(1) == 1, "the kernel writes rows one after the other"
            if taker.out.device.type != RECORDED:
                low_rank_code.add_sums[(-(-self._num_rows // SUMMED_ROWS),)](
                    taker.out, sums, taker.scale, self._num_rows, taker.out.stride(0), self._parts,
                    rank=taker.rank, rows=SUMMED_ROWS, ranks=self.size, num_warps=WARPS,
                )  # fmt: skip


def _launch(
    name: str,
    out: torch.Tensor,
    *others: torch.Tensor,
    parts: list[LowRank],
    sums: _Sums | None = None,
    **options: Any,
) -> None:
    """Start a kernel on tiles of `out` (T, width) and others of this shape, all contiguous.

    A device that is recorded computes nothing.
    """
    if out.device.type == RECORDED:
        return
    num_rows, width = out.shape
    arguments: list[Any] = []
    for low, small, scale in parts:
        assert low.stride(1) == 1, "the kernel reads rows of low one after the other"
        arguments += [low, small, scale, low.stride(0), *small.stride()]
    columns = COLUMNS
    if sums is not None:
        arguments += sums.arguments
        options |= {"tiles": sums.tiles, "ranks": sums.size}
        columns *= sums.tiles
    grid = (-(-num_rows // ROWS) * -(-width // columns),)
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


def act_and_mul(
    gate: torch.Tensor,
    up: torch.Tensor,
    parts: tuple[LowRank, LowRank],
    *,
    activation: str,
    takers: Sequence[Taker] = (),
) -> torch.Tensor:
    """Return act(gate) * up (T, f), of gate and up with their parts. activation: `silu` or
    `gelu_tanh`; takers: one or none, of the product.
    """
    product = torch.empty_like(gate)
    sums = _Sums(takers, gate, count=1)
    of_gate, of_up = parts
    _launch(
        "act_and_mul", product, gate, up, parts=[*parts], sums=sums,
        gate_rank=of_gate.rank, up_rank=of_up.rank, taker_rank=sums.ranks[0], kind=activation,
    )  # fmt: skip
    sums.add_up()
    return product


def act_and_mul_backward_(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    parts: tuple[LowRank, LowRank, LowRank],
    *,
    activation: str,
    takers: Sequence[Taker] = (),
) -> None:
    """In place, for the gradient `grad` of act(gate) * up: `gate` and `up` become their gradients,
    `grad` the product itself. parts: what is still to be added to gate, up, and grad; takers: none,
    or of the product and of both gradients.
    """
    of_gate, of_up, of_grad = parts
    sums = _Sums(takers, gate, count=3)
    product_rank, gate_rank, up_rank = sums.ranks
    _launch(
        "act_and_mul_backward", grad, gate, up, parts=[*parts], sums=sums,
        gate_rank=of_gate.rank, up_rank=of_up.rank, grad_rank=of_grad.rank,
        product_taker_rank=product_rank, gate_taker_rank=gate_rank, up_taker_rank=up_rank,
        kind=activation,
    )  # fmt: skip
    sums.add_up()
    # Autograd does not see what Triton writes. With a new version it refuses a second backward,
    # which would take the gradients in `gate` and `up` for what forward saved.
    increment_version((grad, gate, up))
