"""What processes learn of each other is the same for all of them."""

from typing import Any

from tests.support.captures import ALONE
from tests.support.distributed import TIMEOUT_S, run_distributed
from workflow.lib.distributed.world import any_of_all, largest_of_all, process_group


def learned() -> Any:
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        reason = "no memory" if world.rank == 1 else None
        counts = [10 * world.rank, -world.rank]
        return (
            largest_of_all(counts, world=world),
            any_of_all(reason, world=world),
            any_of_all(None, world=world),
        )


def test_all_processes_learn_the_largest_counts_and_the_first_reason() -> None:
    assert run_distributed(learned, world_size=3) == [([20, 0], "no memory", None)] * 3


def test_a_process_alone_asks_nobody() -> None:
    assert largest_of_all([3, 1], world=ALONE) == [3, 1]
    assert any_of_all("reason", world=ALONE) == "reason"
