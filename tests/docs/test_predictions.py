"""The tables of predictions.md on time say what the model predicts now."""

import re
from pathlib import Path

import pytest

from tests.support.recorded_work import PUBLISHED, published_step
from tests.support.time_fit import table

PAGE = (Path(__file__).parents[2] / "workflow" / "docs" / "predictions.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)


def test_all_published_speeds_are_read():
    assert [name.split(":")[0] for name, *_ in ROWS] == list(PUBLISHED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row_says_what_the_model_predicts(row):
    name, _, told = row
    step = published_step(name.split(":")[0])
    expected = step.plan.tokens / sum(step.parts().values())
    assert float(told.replace(",", "")) == pytest.approx(expected, rel=0.005, abs=0.6)


def test_errors_beside_measured_steps_are_those_of_today():
    assert table() in PAGE
