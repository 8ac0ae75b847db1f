"""The reason why a stage failed: the last error of its log, shown once, in place of its command.

A stage writes `BEGUN` first and `ENDED` last, unless it fails with an error. A log with neither an
end nor an error is of a killed stage."""

import logging
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from workflow.lib.system.errors import PeerLostError
from workflow.lib.system.limits import INTERRUPTED

RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<text>.*)$")
TROUBLE = frozenset({"WARNING", "ERROR", "CRITICAL"})
CLOCKS_DIFFER_S = 300.0  # between this machine and a shared disk
BEGUN, ENDED = "the stage has begun", "the stage has ended"


# Of a stage that Snakemake started here: its errors are shown from its log, by `FailedJobs`.
ERRORS_FROM_LOG = "STAGE_ERRORS_FROM_LOG"


# Of a reason: lists of made files, and settings as JSON. Files that a user changed stay.
LISTED = re.compile(
    r"(?:(?<=Missing output files)|(?<=updated by another job)): [^;]*"
    r"|(?<=have changed since last execution): .*",
    re.DOTALL,
)
KILLED = "the stage ended without a word"
# Snakemake's events and messages after a cause; it stands at the end of the terminal's output.
FINISHED = ("job_finished", "progress")
SAYS_LESS = ("Exiting because a job execution failed", "At least one job did not complete")


class FailedJobs(logging.Filter):
    """Filter of Snakemake's messages on the terminal: of a failed job show the error in its log, in
    place of its command. since: as of `failure_causes`; is_interrupted: whether the user ends the
    jobs, of which those that still import packages write no error; end_others: called at a failed
    job, ends those that prepare others; returns whether there are some."""

    def __init__(
        self,
        folder: Path,
        *,
        since: float,
        is_interrupted: Callable[[], bool] = lambda: False,
        end_others: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._folder, self._since, self._is_interrupted = folder, since, is_interrupted
        self._end_others, self._has_ended_others = end_others, False
        self._shown: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop Snakemake's messages of a failed job whose cause was shown."""
        text = record.getMessage()
        if "CalledProcessError in file" in text:
            return False  # `job_error`, which follows, has the same command
        if (self._shown or self._is_interrupted()) and any(less in text for less in SAYS_LESS):
            return False
        event = getattr(record, "event", None)
        if event != "job_error":
            return not (self._has_ended_others and event in FINISHED)
        is_explained = self.show() or self._is_interrupted() or self._has_ended_others
        self._has_ended_others |= self._end_others()
        return not is_explained

    def show_last(self) -> None:
        """Print the causes that are left, or that the user ended the jobs."""
        self.show()
        if self._is_interrupted() and not self._shown:
            print(INTERRUPTED, file=sys.stderr, flush=True)

    def show(self) -> bool:
        """Print causes that were not shown yet; return whether there are some."""
        causes = failure_causes(self._folder, since=self._since)
        new = [cause for cause in causes if cause not in self._shown]
        if self._has_ended_others:
            new = [cause for cause in new if KILLED not in cause]
        for cause in new:
            print(cause, file=sys.stderr, flush=True)
        self._shown.update(new)
        return bool(new)


class ShortJobs(logging.Formatter):
    """Formatter of Snakemake's messages on the terminal: of a job that starts no paths of inputs
    and outputs, and of its reason no lists of them. Snakemake's own log has all."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        if getattr(record, "event", None) == "job_info":
            reason = LISTED.sub("", str(record.__dict__.get("reason") or "")) or None
            short: dict[str, Any] = {"input": [], "output": [], "resources": {}, "reason": reason}
            record = logging.makeLogRecord(record.__dict__ | short)
        return self._inner.format(record)


def failure_causes(folder: Path, *, since: float) -> list[str]:
    """Return the cause by each log below `folder` that was written after `since` (Unix seconds) and
    ends with an error, or in the middle; of a traceback the first and last line. Logs from the
    future belong to another invocation."""
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
    marks = [number for number, (_, lines) in enumerate(records) if lines[0] in (BEGUN, ENDED)]
    if not marks or records[marks[-1]][1][0] != BEGUN:
        return None
    # Another command's stage may write on after an error of this one.
    if any(level in ("ERROR", "CRITICAL") for level, _ in records[marks[-1] :]):
        return _shortened(_first_hand(records))
    return (
        f"{KILLED}; the last was: {_shortened(records[-1][1])}. It was "
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
    if len(lines) == 2 or any(line.startswith("Traceback") for line in lines):
        return f"{lines[0]} ... {lines[-1].strip()}"
    return "\n".join(lines)
