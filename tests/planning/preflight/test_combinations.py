"""Unusual settings, models and rows at once: each combination is planned, or refused in words."""

import math
import re
from dataclasses import replace

import pytest

from tests.support.combinations import covering, drawn, planned_run
from tests.support.recordings import forked_recordings
from workflow.lib.planning.preflight.decision import decide
from workflow.lib.planning.preflight.forecast import forecast
from workflow.lib.planning.preflight.plan_search import NotRecordedError
from workflow.lib.planning.preflight.planning_inputs import (
    circumstances,
    wanted,
)
from workflow.lib.planning.preflight.table import render, summary
from workflow.lib.step_plan.memory_options import TABLE
from workflow.lib.system.errors import UserError

# A setting, its value or a bound, and what to change.
REFUSAL = re.compile(r"[a-z]+\.\w+( = .+?)?: .+\. [A-Z].+\.", re.DOTALL)
SEARCHES = range(40)
AGAIN = 8  # of so many searches one is made twice


@pytest.fixture(scope="module")
def process():
    with forked_recordings() as started:
        yield started


def checked(planned):
    """Decide on a run, check and return its forecast; raises `UserError` for a refused one."""
    decision = decide(planned)
    found = forecast(decision, planned)
    plan, limits = decision.chosen.plan, decision.limits
    assert found.peak_bytes > 0, "it was not recorded"
    assert all(term.bytes >= 0 for term in found.terms)
    assert sum(term.bytes for term in found.terms) == pytest.approx(found.peak_bytes, rel=1e-6)
    if decision.fits:
        outside = limits.outside_allocator_bytes + limits.margin_bytes
        assert found.reserved_bytes + outside <= limits.capacity_bytes
        assert limits.host_capacity_bytes is None or found.host_bytes <= limits.host_capacity_bytes
    assert found.time.step_s is None or 0 < found.time.step_s < math.inf
    assert all(0 <= seconds < math.inf for seconds in found.time.parts_s.values())
    rows = plan.micro_batch_size * plan.accumulation_steps * plan.row_groups
    assert rows == planned.settings.train.global_batch_size
    check_options(planned, plan)
    assert render(found, run="case")
    assert summary(found, run="case")
    return found


def check_options(planned, plan):
    """Check that a plan has what the settings ask for, and nothing that an obstacle forbids."""
    where = circumstances(planned.settings, planned.shape, planned.machine)
    for option in TABLE:
        asked, value = wanted(planned.settings, option), option.of(plan)
        if asked == "auto" and value != option.off:
            assert option.obstacle(plan, value, where) is None, option.field
        elif asked != "auto" and not option.left_out:
            assert value == asked, option.field


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_each_value_is_planned_together_with_others(process, seed):
    """A plan's own settings, without a search: one recording for each."""
    for number, combination in enumerate(covering(seed)):
        print(number, combination)  # of a failure
        checked(replace(planned_run(combination, recordings=process), estimate=True))


def outcome(process, seed):
    """The forecast of a drawn combination, or its refusal in words."""
    try:
        return checked(planned_run(drawn(seed), recordings=process))
    except NotRecordedError:
        raise
    except UserError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEARCHES)
def test_drawn_combination_is_searched_alike_again_or_refused_in_words(
    process, seed, monkeypatch, tmp_path
):
    """Recordings of the first search are not there for the second."""
    first = outcome(process, seed)
    if isinstance(first, str):
        assert REFUSAL.fullmatch(first.partition("\n  ")[2] or first)
    elif seed % AGAIN == 0:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert outcome(process, seed) == first
