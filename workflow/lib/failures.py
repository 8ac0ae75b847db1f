"""Why a workflow stopped: the last error of every stage's log, to be said once more where a user looks, at the end."""

import re
from collections.abc import Iterator
from pathlib import Path

RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<text>.*)$")
TROUBLE = frozenset({"WARNING", "ERROR", "CRITICAL"})


def failure_causes(folder: Path, *, since: float) -> list[str]:
    """Return one line per log below `folder` that was written after `since` (Unix seconds) and ends in trouble.

    Of a message of several lines (a table, a traceback) the first and the last are kept.
    """
    logs = sorted(path for path in folder.rglob("*.log") if path.stat().st_mtime >= since)
    found = ((path, list(_records(path))) for path in logs)
    return [
        f"{path}: {_shortened(records[-1][1])}"
        for path, records in found
        if records and records[-1][0] in TROUBLE
    ]


def _records(log: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield level and lines of every record."""
    level, lines = "", []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        start = RECORD.match(line)
        if start is None:
            lines.append(line)
            continue
        if level:
            yield level, lines
        level, lines = start["level"], [start["text"]]
    if level:
        yield level, lines


def _shortened(lines: list[str]) -> str:
    return " ... ".join([lines[0], lines[-1].strip()]) if len(lines) > 1 else lines[0]
