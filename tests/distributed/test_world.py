"""What processes learn of each other is the same for all of them."""

import torch

from tests.support.distributed import TIMEOUT_S, run_distributed
from workflow.lib.distributed.world import any_of_all, decide_kernels, largest_of_all, process_group
from workflow.lib.kernels.op import Decision, Key

CPU = torch.device("cpu")


def learned():
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        reason = "no memory" if world.rank == 1 else None
        counts = [10 * world.rank, -world.rank]
        return (
            largest_of_all(counts, world=world),
            any_of_all(reason, world=world),
            any_of_all(None, world=world),
        )


def test_all_processes_learn_the_largest_counts_and_the_first_reason():
    assert run_distributed(learned, world_size=3) == [([20, 0], "no memory", None)] * 3


def allowed():
    """A process of which one kernel fails, beside one on which another fails."""
    decision, keys = Decision(), [Key(name, (torch.bfloat16, 64)) for name in "abc"]

    def used():
        faults = {0: keys[0], 1: keys[1]}
        with process_group("cpu", timeout_s=TIMEOUT_S) as world:
            at_fault = faults[world.rank]
            for key in keys:
                decision.allows(key, CPU, lambda key=key: "no" if key == at_fault else None)
            decide_kernels(world, decision)
        return [decision.allows(key, CPU, lambda: None) for key in keys]

    return used()


def test_kernel_that_one_process_cannot_use_is_used_by_none():
    assert run_distributed(allowed, world_size=2) == [[False, False, True]] * 2
