"""Work over processes: in order, whatever their number, and a killed one is told apart from a
defect."""

import os
import signal

import pytest

from workflow.lib.data.tokens.process_pool import KilledError, map_in_order


def doubler():
    return double


def double(number):
    if number == 666:
        os.kill(os.getpid(), signal.SIGKILL)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number


@pytest.mark.parametrize(("processes", "alone"), [(1, 0), (2, 0), (2, 100)])
def test_results_come_in_the_order_of_the_tasks(processes, alone):
    results = map_in_order(range(37), prepare=doubler, processes=processes, alone=alone)
    assert list(results) == [2 * number for number in range(37)]


def test_mistake_of_a_task_is_raised_here():
    with pytest.raises(ValueError, match="-1 is negative"):
        list(map_in_order([1, 2, -1, 3], prepare=doubler, processes=2, alone=0))


def test_killed_process_is_told_with_what_to_do():
    with pytest.raises(KilledError, match=r"memory ran out.* fewer cores .* finished work is kept"):
        list(map_in_order([1, 666, 3], prepare=doubler, processes=2, alone=0))
