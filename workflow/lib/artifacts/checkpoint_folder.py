"""The files of a run in progress: `step-<8 digits>` and `best-<8 digits>` (adapters with the lowest
held-out loss so far), `metrics.jsonl` and `history.jsonl`. No rule declares them."""

import re
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from workflow.lib.system.checksums import row_of, write_lines
from workflow.lib.system.locks import exclusive

STEP_PATTERN = re.compile(r"^step-(\d{8,})$")
METRICS, HISTORY = "metrics.jsonl", "history.jsonl"


def saved_steps(folder: Path) -> list[int]:
    """Return the steps with a complete checkpoint, ascending."""
    matches = (STEP_PATTERN.match(p.name) for p in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for match in matches if match)


def step_dir(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return folder / f"step-{step:08d}"


def set_aside(folder: Path, *, after: int = 0, results: Path | None = None) -> Path:
    """Move checkpoints and best adapters after step `after`, and the `results` of the run's end, to
    a new folder `set-aside-<number>` in it; return that. No other process may write meanwhile."""
    aside = folder / f"set-aside-{1 + len([*folder.glob('set-aside-*')])}"
    aside.mkdir()
    steps = saved_steps(folder)
    note = {"from_step": max(steps, default=0), "to_step": after, "unix_s": round(time.time())}
    write_lines(folder / HISTORY, [*whole_rows(folder / HISTORY), note])
    # The newest last: until it is moved, the command can be repeated.
    folders = [*folder.glob("best-*"), *(step_dir(folder, step) for step in steps)]
    later = [path for path in folders if int(path.name.rpartition("-")[2]) > after]
    for path in (*([] if results is None else [results]), *later):
        if path.exists():
            path.rename(aside / path.name)
    return aside


def begin_anew(folders: Iterable[Path]) -> Iterator[str]:
    """Set aside all checkpoints of a run whose training is forced. Yields a message for each
    folder. Raises `UserError` if the run is being trained."""
    for folder in filter(saved_steps, folders):
        with exclusive(folder / ".lock", doing="training this run"):
            yield (
                "training begins anew, as forced; the checkpoints so far are in "
                f"{set_aside(folder)}: delete that folder when nobody needs it"
            )


def rewind_metrics(
    path: Path, *, step: int, source: Path | None = None, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Write a metrics file from the whole rows of `source`, or of itself, up to `step`; leave out
    the fields `without`."""
    rows = [
        {name: value for name, value in row.items() if name not in without}
        for row in whole_rows(source or path)
        if row["step"] <= step
    ]
    write_lines(path, rows)
    return rows


def whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of lines up to the first that is cut (killed while appending) or
    damaged (by a disk). Later lines need not continue the earlier rows, and are ignored. A missing
    file has no rows."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            yield row_of(line)
        except (ValueError, TypeError):
            return


def damaged_line(path: Path) -> int | None:
    """Return the number of the first changed line of a file of lines; None if all agree with their
    checksums. A last line without a line feed was cut by a kill, and is no damage."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    num_whole = sum(1 for _ in whole_rows(path))
    return num_whole + 1 if num_whole < text.count("\n") else None


def trained_otherwise(folder: Path) -> str | None:
    """Describe checkpoints of other settings of a run that has none in `folder`; None if there are
    none. folder: `<run>-<key of settings>-<key of content>`."""
    run = folder.name.rsplit("-", 2)[0]
    folders = [p for p in folder.parent.glob("*-*-*") if p.name.rsplit("-", 2)[0] == run]
    folders_trained = sorted(p.name for p in folders if p != folder and saved_steps(p))
    if not folders_trained or saved_steps(folder):
        return None
    return (
        f"training begins anew: {folders_trained[-1]} holds checkpoints of other settings, data or "
        "base. To train a finished adapter further, leave its run as it was, and add a run with "
        f"train.start_from: {run}"
    )


def left_by(killed: str, folder: Path) -> str:
    """Describe the progress of process `killed` with these checkpoints, and its remains."""
    reached = max((row["step"] for row in whole_rows(folder / METRICS)), default=0)
    when = f"after step {reached}" if reached else "before its first step"
    newest = max(saved_steps(folder), default=0)
    remains = (
        f"its newest checkpoint is that of step {newest}" if newest else "it left no checkpoint"
    )
    return f"the training before this one (process {killed}) was killed {when}; {remains}"
