"""Predicted seconds of a step beside all that were measured and are of the engine of today. Their
work was recorded before (`tests.support.recorded_work`)."""

import pytest

from tests.support.measurements import measured_lines
from tests.support.recorded_work import kept_work, measured_steps, recorded
from tests.support.time_fit import GROUPS, group_of, summary
from workflow.lib.settings.optimizer_kinds import OPTIMIZERS

STEPS = measured_steps()
# Median, 90%, worst. Python's speed differs from host to host, and so do copies to a host's memory.
BOUNDS = {
    GROUPS[0]: (0.025, 0.06, 0.12),
    GROUPS[1]: (0.04, 0.17, 0.28),
    GROUPS[2]: (0.05, 0.24, 0.50),
}


def test_measurements_are_of_many_models():
    assert len(STEPS) >= 100
    assert len({step.model for step in STEPS}) >= 30


@pytest.mark.parametrize("group", GROUPS)
def test_steps_take_what_was_predicted(group):
    reached = summary([x for x in STEPS if group_of(x) == group])
    assert all(x <= bound for x, bound in zip(reached, BOUNDS[group], strict=True)), reached


def test_every_step_lies_in_the_range_that_was_told():
    outside = [step.label for step in STEPS if not _told(step)]
    assert not outside


def _told(step):
    spread = step.spread()
    each_s = step.measured_s / step.plan.accumulation_steps
    return spread.least_s <= each_s <= spread.most_s


def test_range_of_nearly_all_steps_that_wait_for_no_host_is_within_13_percent():
    """Python launches references and 8-bit updates, and an update of the smallest model takes as
    long as its graph."""
    alone = [
        step.spread()
        for step in STEPS
        if group_of(step) == GROUPS[0]
        and step.plan.forward_passes == 1
        and OPTIMIZERS[step.plan.optimizer].device_decides
    ]
    narrow = [spread.most_s / spread.least_s < 1.13**2 + 1e-3 for spread in alone]
    assert len(narrow) >= 200
    assert sum(narrow) >= 0.99 * len(narrow)


def test_all_steps_together_are_within_what_a_plan_is_chosen_by():
    middle, most, _ = summary(STEPS)
    assert (middle, most) <= (0.03, 0.07)
    assert most <= 0.07


def test_steps_that_no_rate_was_fitted_to_take_what_was_predicted():
    cases = {line["case"] for line in measured_lines("recorded/held-out_1xh200_2026-11-27.jsonl")}
    steps = [x for x in STEPS if x.label.split(",")[0] in cases and x.gpu.name == "NVIDIA H200"]
    assert len(steps) >= len(cases)
    assert all(abs(step.error()) <= 0.07 for step in steps)


@pytest.mark.slow
def test_kept_work_is_what_is_recorded_today():
    kept = kept_work()
    for key in list(kept)[:: len(kept) // 3]:
        assert recorded(key) == kept[key]
