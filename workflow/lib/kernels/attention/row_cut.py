"""Rows whose tokens are divided among the processes of a group: each has a slice of every row.

Layers compute a slice's tokens alone, but for attention (`head_exchange`). Sums over a document are
sums over the group."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RowCut:
    """A micro-batch's rows before their division. position_ids: (rows, seq_len), a multiple of the
    group's processes; positions: (n,) int64, in the flattened rows, of the states that predict this
    process's trained tokens."""

    group: dist.ProcessGroup
    position_ids: torch.Tensor
    positions: torch.Tensor

    @property
    def size(self) -> int:
        """Processes that share a row."""
        return self.group.size()

    @property
    def first(self) -> int:
        """Position in a row of this process's first token."""
        return self.group.rank() * self.position_ids.shape[1] // self.size

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RowCut":
        """Return the same with `change` applied to its tensors."""
        return replace(
            self, position_ids=change(self.position_ids), positions=change(self.positions)
        )

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the group's values. Collective. Each process must use it alike, for its
        equal share of a loss (`share`)."""
        total: torch.Tensor = _Summed.apply(values, self)  # type: ignore[no-untyped-call]
        return total


def share(total: torch.Tensor, cut: RowCut | None) -> torch.Tensor:
    """Return a process's share of a number that all processes of a row compute."""
    return total if cut is None else total / cut.size


class _Summed(torch.autograd.Function):
    """Backward adds the equal gradients of all processes' shares."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, cut: RowCut) -> torch.Tensor:
        ctx.size, total = cut.size, values.clone()
        dist.all_reduce(total, group=cut.group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.size, None
