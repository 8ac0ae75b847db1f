"""The memory that recordings predict, beside what GPUs have measured, and the page that shows
it.
"""

from collections.abc import Iterator

import pytest

from tests.support.measurements import MARKS, PAGE, all_lines, counts, line_of, row
from workflow.lib.recording.recording_process import RecordingProcess, recording_process

LINES = {(line["case"], line["versions"]["commit"]): line for line in all_lines() if counts(line)}
# One of each kind: `python -m tests.support.measurements` looks at all.
KINDS = (
    ("moe_kept", "e477513"),
    ("moe", "e477513"),
    ("oss_kept", "e477513"),
    ("mixtral", "e477513"),
    ("wide_float8_offloaded", "0223b86"),
    ("batch_2_mostly_offloaded", "79c85ae"),
    ("hsdp", "78128dc"),
    ("8b_offloaded_layers_half", "79d1f8a"),
    ("offloaded_five", "e854bc4"),
)
LARGEST_ALLOCATED_ERROR, LARGEST_RESERVED_ERROR = 0.001, 0.015


@pytest.fixture(scope="module")
def process() -> Iterator[RecordingProcess]:
    with recording_process() as found:
        yield found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_recorded_memory_is_what_was_measured(
    process: RecordingProcess, kind: tuple[str, str]
) -> None:
    """And the page says so."""
    found = row(LINES[kind], process)
    assert abs(found.allocated_error) < LARGEST_ALLOCATED_ERROR
    assert abs(found.reserved_error) < LARGEST_RESERVED_ERROR
    page = PAGE.read_text(encoding="utf-8")
    assert line_of(found) in page, "run python -m tests.support.measurements"


def test_page_shows_every_measurement() -> None:
    _, shown = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    table, _ = shown.split(MARKS[1])
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    measured = [line for line in all_lines() if counts(line)]
    assert len(rows) == len(measured) > 70
    assert table.startswith(f"{len(rows)} measurements.")
