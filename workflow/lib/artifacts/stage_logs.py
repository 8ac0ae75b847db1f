"""The reason why a workflow stopped: the last error of every stage's log, repeated at the end.

A stage writes `BEGUN` first and `ENDED` last, unless it fails with an error. A log with neither an
end nor an error last is of a killed stage."""

import re
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from workflow.lib.system.errors import PeerLostError

RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<text>.*)$")
TROUBLE = frozenset({"WARNING", "ERROR", "CRITICAL"})
CLOCKS_DIFFER_S = 300.0  # between this machine and a shared disk
BEGUN, ENDED = "the stage has begun", "the stage has ended"


def failure_causes(folder: Path, *, since: float) -> list[str]:
    """Return a line per log below `folder` that was written after `since` (Unix seconds) and ends
    with an error, or in the middle: a message's first and last line. Logs from the future belong to
    another invocation."""
    until = time.time() + CLOCKS_DIFFER_S
    logs = sorted(path for path in folder.rglob("*.log") if since <= path.stat().st_mtime <= until)
    causes = ((path, _cause(list(_records(path)))) for path in logs)
    return [f"{path}: {cause}" for path, cause in causes if cause is not None]


def from_the_future(paths: Iterable[Path]) -> str | None:
    """Return the message for files, among and below `paths`, that are newer than now, or None."""
    until = time.time() + CLOCKS_DIFFER_S
    late = [path for path in paths if any(f.stat().st_mtime > until for f in _files(path))]
    if not late:
        return None
    return (
        f"files of {', '.join(map(str, late))} are from the future: the clock was put back, or "
        "another machine's is ahead. Snakemake refuses what is made from them. This mends it: find "
        f"-L {shlex.join(map(str, late))} -type f -exec touch {{}} +"
    )


def _files(path: Path) -> Iterator[Path]:
    yield from (p for p in (path, *path.rglob("*")) if p.is_file())


def _cause(records: list[tuple[str, list[str]]]) -> str | None:
    if records and records[-1][0] in TROUBLE:
        return _shortened(_first_hand(records))
    marks = [lines[0] for _, lines in records if lines[0] in (BEGUN, ENDED)]
    if marks[-1:] != [BEGUN]:
        return None
    return (
        f"the stage ended without a word; the last was: {_shortened(records[-1][1])}. It was "
        "killed from outside, or by the kernel for lack of memory (`dmesg` tells). Repeat the "
        "command to continue from what is finished."
    )


def _first_hand(records: list[tuple[str, list[str]]]) -> list[str]:
    """Return the last error since the stage began that is no consequence of another machine's, else
    the last record: launchers of several machines share a log, and stop because of each other."""
    begins = [n for n, (_, lines) in enumerate(records) if lines[0] == BEGUN]
    since = records[begins[-1] :] if begins else records[-1:]
    errors = [lines for level, lines in since if level in ("ERROR", "CRITICAL")]
    causes = [lines for lines in errors if not lines[0].startswith(PeerLostError.MARK)]
    return causes[-1] if causes else records[-1][1]


def _records(log: Path) -> Iterator[tuple[str, list[str]]]:
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
