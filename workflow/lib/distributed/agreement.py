"""What processes must know of each other before they do the same. They ask over the CPU, so that
nobody waits for a GPU's queue. All functions are collective.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from workflow.lib.distributed.world import World

ValueT = TypeVar("ValueT")


def largest_of_all(counts: Sequence[int], *, world: World) -> list[int]:
    """Return the largest of each count of any process."""
    if world.size == 1:
        return list(counts)
    largest = torch.tensor(counts)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=world.io_group)
    numbers: list[int] = largest.tolist()
    return numbers


def any_of_all(value: ValueT | None, *, world: World) -> ValueT | None:
    """Return the first process's `value` that is not None; None if there is none."""
    values: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value, group=world.io_group)
    return next((one for one in values if one is not None), None)
