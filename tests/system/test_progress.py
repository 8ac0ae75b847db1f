"""How far a long piece of work is: a bar on a terminal, elsewhere lines of the log."""

import contextlib
import io
import logging
import threading

import pytest

from workflow.lib.system.progress import Progress


def test_line_tells_what_is_done_and_what_is_left():
    progress = Progress("held-out loss", total=40, unit="documents", total_work=1000.0)
    assert progress.line(31.0) == (
        "held-out loss: 0 of 40 documents in 31 s; the time left is not known yet"
    )
    progress.add(3, work=400.0)  # the longest come first
    assert (
        progress.line(60.0)
        == "held-out loss: 3 of 40 documents in 1 min 0 s, about 1 min 30 s left"
    )
    progress.add(37, work=600.0)
    assert progress.line(90.0) == "held-out loss: 40 of 40 documents in 1 min 30 s, about 0 s left"


def test_line_of_work_without_known_end_tells_what_is_done():
    progress = Progress("data.train", total=None, unit="rows")
    progress.add(1234)
    assert progress.line(31.0) == "data.train: 1234 rows in 31 s"


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self):
        return True


def test_what_is_done_is_shown_as_a_bar_on_a_terminal():
    terminal = Terminal()
    with (
        contextlib.redirect_stderr(terminal),
        Progress("data.train", total=None, unit="rows") as progress,
    ):
        progress.add(1000)
        progress.add(234)
    assert "data.train: 1234rows" in terminal.getvalue()


class Lines(logging.Handler):
    """Waits for lines of the log."""

    def __init__(self):
        super().__init__()
        self.lines = []
        self.second = threading.Event()

    def emit(self, record):
        self.lines.append(record.getMessage())
        if len(self.lines) == 2:
            self.second.set()


def test_lines_come_although_nothing_is_finished_and_end_with_the_block():
    logger, heard = logging.getLogger("workflow"), Lines()
    level = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        with Progress("tasks", total=5, unit="requests", line_s=1e-3):
            heard.second.wait()
        assert not [t for t in threading.enumerate() if t.name == "progress"]
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
    assert all(line.startswith("tasks: 0 of 5 requests in ") for line in heard.lines)


def test_an_error_within_the_block_passes_and_ends_the_lines():
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        Progress("tasks", total=5, unit="requests"),
    ):
        raise RuntimeError("out of memory")
    assert not [t for t in threading.enumerate() if t.name == "progress"]
