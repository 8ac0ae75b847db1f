"""Predictions as tables that a terminal can show."""

import pytest

from tests.support.plans import make_forecast
from workflow.lib.planning.preflight.table import WIDTH, render


@pytest.mark.parametrize("columns", [71, 80, 300])
def test_no_line_is_wider_than_the_terminal_or_the_log(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))

    lines = render(make_forecast(), run="demo").splitlines()
    assert max(map(len, lines)) <= min(columns, WIDTH)
    assert any("hardware.memory_margin_gib" in line for line in lines)
