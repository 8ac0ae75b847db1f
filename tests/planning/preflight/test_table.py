"""Predictions as tables that a terminal can show."""

import re

import pytest

from tests.support.plans import make_forecast, make_plan, tried_plan
from workflow.lib.planning.preflight.table import WIDTH, render


@pytest.mark.parametrize("columns", [71, 80, 300])
def test_no_line_is_wider_than_the_terminal_or_the_log(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))

    lines = render(make_forecast(), run="demo").splitlines()
    assert max(map(len, lines)) <= min(columns, WIDTH)
    assert any("hardware.memory_margin_gib" in line for line in lines)


def test_long_steps_are_told_in_hours():
    time = {
        "step_s": 6870.0,
        "step_range_s": (30.0, 7000.0),
        "range_due_to": "the link",
        "total_h": 12.0,
        "tokens_per_s_per_process": 9.0,
        "cost": None,
        "parts_s": {},
        "basis": "a probe",
    }
    text = " ".join(re.sub("[│┃]", " ", render(make_forecast(time=time), run="demo")).split())
    assert "1 h 54 min a step (30 s to 1 h 56 min" in text


def test_every_column_has_a_head():
    terms, plans, facts = [
        [cell.strip() for cell in line.split("┃")[1:-1]]
        for line in render(make_forecast(), run="demo").splitlines()
        if line.startswith("┃")
    ]
    assert terms == ["term", "size", "what it is"]
    assert plans == ["micro-batch", "recomputation", "peak memory", "time, % of chosen", "result"]
    assert facts == ["fact", "value"]


def test_processes_that_share_a_row_stand_beside_its_micro_batch(monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    plan = make_plan(processes=4, context_parallel=2)
    tried = [
        tried_plan(context_parallel=1, why="0.20 GiB too much", fits=False, relative_time=0.9),
        tried_plan(context_parallel=2),
    ]
    text = render(make_forecast(plan=plan, candidates=tried), run="demo")
    cells = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert {"1", "1 over 2 processes"} < {*cells}
    told = " ".join(re.sub("[│┃]", " ", text).split())
    assert "4 x cpu, micro-batch 1 over 2 processes (hardware.context_parallel) x" in told
