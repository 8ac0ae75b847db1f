"""What a user sees while rows are encoded."""

import contextlib
import io
import logging

from workflow.lib.data.tokens.corpus import Progress


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


def test_rows_done_are_shown_as_a_bar_on_a_terminal():
    with contextlib.redirect_stderr(Terminal()) as shown, Progress("data.train") as progress:
        progress.add(1000)
        progress.add(234)
    assert "data.train: 1234row" in shown.getvalue()


def test_rows_done_are_told_in_the_log_from_time_to_time(caplog):
    caplog.set_level(logging.INFO, logger="workflow")
    with Progress("data.train", log_seconds=0) as logged, Progress("data.heldout") as not_yet:
        logged.add(1000)
        logged.add(234)
        not_yet.add(1)
    assert [record.getMessage().split(", ")[0] for record in caplog.records] == [
        "data.train: 1000 rows done",
        "data.train: 1234 rows done",
    ]
