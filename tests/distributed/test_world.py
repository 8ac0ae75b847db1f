"""What processes learn of each other is the same for all of them."""

import torch

from tests.support.distributed import run_in_group
from workflow.lib.distributed.world import any_of_all, decide_kernels, largest_of_all
from workflow.lib.kernels.op import Decision, Key

CPU = torch.device("cpu")


def learned(world):
    reason = "no memory" if world.rank == 1 else None
    counts = [10 * world.rank, -world.rank]
    return (
        largest_of_all(counts, world=world),
        any_of_all(reason, world=world),
        any_of_all(None, world=world),
    )


def test_all_processes_learn_the_largest_counts_and_the_first_reason():
    assert run_in_group(learned, world_size=3) == [([20, 0], "no memory", None)] * 3


def allowed(world):
    """A process of which one kernel fails, beside one on which another fails."""
    decision, keys = Decision(), [Key(name, (torch.bfloat16, 64)) for name in "abc"]
    for key in keys:
        decision.allows(key, CPU, lambda key=key: "no" if key == keys[world.rank] else None)
    decide_kernels(world, decision)
    return [decision.allows(key, CPU, lambda: None) for key in keys]


def test_kernel_that_one_process_cannot_use_is_used_by_none():
    assert run_in_group(allowed, world_size=2) == [[False, False, True]] * 2
