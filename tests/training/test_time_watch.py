"""The forecast of a training's time, held against its first steps."""

import itertools

import pytest

from workflow.lib.training import run_record
from workflow.lib.training.run_record import CHECKPOINTS, DATA, HELDOUT, STEPS, TimeWatch

EVERY = {HELDOUT: 5, CHECKPOINTS: None}


def told(watch):
    """What is told of 14 steps, of which the first takes a hundred times as long."""
    of_steps = [100.0] + [1.0] * 13
    lines = [watch.after_step(s, step=step) for step, s in enumerate(of_steps, start=21)]
    return {step: line for step, line in enumerate(lines, start=1) if line}


@pytest.mark.parametrize("predicted_s", [1.0, 0.92, 1.11, None])
def test_forecast_that_is_within_10_percent_is_not_told(predicted_s):
    assert told(TimeWatch(predicted_s, 100, EVERY)) == {}


@pytest.mark.parametrize(("predicted_s", "off"), [(0.5, "+100%"), (2.0, "-50%")])
def test_forecast_that_is_off_is_corrected_once_after_ten_steps(predicted_s, off):
    (line,) = told(TimeWatch(predicted_s, 30 + 3600, EVERY)).items()
    assert line[0] == 10
    assert f"were predicted ({off})" in line[1]
    assert f"most of it is {STEPS} " in line[1]
    assert line[1].endswith("Corrected: 1 h 0 min left")


@pytest.mark.parametrize(
    ("parts_s", "worst"),
    [({DATA: [4.0]}, f"{DATA} (+0.4 s a step)"), ({HELDOUT: [3.0]}, f"{HELDOUT} (+0.6 s a step)")],
    ids=str,
)
def test_part_that_was_off_is_named(parts_s, worst):
    """Measured steps hold the waiting for data."""
    predicted_s = 1.0 - sum(parts_s.get(DATA, ())) / 10
    watch = TimeWatch(predicted_s, 100, EVERY, parts_s=parts_s)
    (line,) = told(watch).values()
    assert f"most of it is {worst}" in line


def test_parts_and_steps_are_what_the_clock_says(monkeypatch):
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(run_record.time, "monotonic", lambda: next(clock))
    watch = TimeWatch(3.0, 2, EVERY)
    assert list(watch.waited(iter("ab"))) == ["a", "b"]  # the end is waited for, too
    with watch.part(CHECKPOINTS):
        pass
    for seconds in (9.0, 5.0, 7.0):
        watch.after_step(seconds, step=1)
    assert watch.document() == {
        "predicted_step_s": 3.0,
        "measured_step_s": 6.0,
        "parts_s": {STEPS: 15.0, DATA: 6.0, CHECKPOINTS: 2.0},
    }


def test_start_without_a_step_has_no_measured_step():
    assert TimeWatch(3.0, 2, EVERY).document()["measured_step_s"] is None


@pytest.mark.parametrize(("predicted_s", "first"), [(0.5, 0.5), (None, 100.0)])
def test_coming_steps_take_what_is_predicted_until_a_second_one_is_measured(predicted_s, first):
    """The first compiles and captures."""
    watch = TimeWatch(predicted_s, 100, EVERY)
    watch.after_step(100.0, step=1)
    assert watch.coming_s == first
    watch.after_step(2.0, step=2)
    assert watch.coming_s == 2.0
