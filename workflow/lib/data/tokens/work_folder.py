"""The work folders of a tokens folder: parts that survive a kill, and a folder whole or absent.

Both lie beside the output and are no declared outputs, which Snakemake deletes when a job fails."""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from workflow.lib.data.tokens.process_pool import KilledError
from workflow.lib.data.tokens.token_store import REJECTS, TRUNCATED
from workflow.lib.system.checksums import checked_line
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import new_folder, write_text

# Why a held-out row is dropped.
OVERLAP = "duplicate of a training row"
SHARED_GROUP = "group of a training row"
NEAR_DUPLICATE = "near-duplicate of a training row"
BEGUN_WITH = "begun_with.txt"  # the key of a folder of shards


Line = dict[str, Any]
"""A line of a list, without its file. `rejects.jsonl`: number of the `row`, `reason`, `preview`
(first characters). `truncated.jsonl`: `documents` of `kept` tokens from a `row` of `tokens`."""


def reason_kind(reason: str) -> str:
    """Return the part of a reason that is counted."""
    return reason.split(":")[0]


class Listing:
    """Writes `rejects.jsonl` and `truncated.jsonl`, and keeps their counts. A context manager."""

    def __init__(self, *, rejects: Path, truncated: Path) -> None:
        self._rejects = rejects.open("w", encoding="utf-8")
        self._truncated = truncated.open("w", encoding="utf-8")
        self.dropped_by_reason: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._rejects.close()
        self._truncated.close()

    def drop(self, line: Line, *, file: str) -> None:
        """List and count a dropped row."""
        self.dropped_by_reason[reason_kind(line["reason"])] += 1
        self._rejects.write(checked_line({"file": file, **line}))

    def cut(self, line: Line, *, file: str) -> None:
        """List a row that was cut or divided."""
        self._truncated.write(checked_line({"file": file, **line}))


logger = logging.getLogger("workflow")


@contextmanager
def work_folder(output: Path, *, key: str) -> Iterator[Path]:
    """Yield the folder of finished parts for `key`; others are removed. It stays after an
    interruption, and is removed after success, or a fault of data or settings."""
    parent = output.with_name(f".{output.name}.work")
    work = parent / key
    tell_of_others(parent)
    for other in parent.glob("*"):
        if other != work:
            remove_folder(other)
    if work.is_dir():
        logger.info("an earlier start was interrupted: its finished parts are used (%s)", work)
    work.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    except UserError as error:
        if not isinstance(error, KilledError):
            remove_folder(parent)
        raise
    else:
        remove_folder(parent)


def tell_of_others(parent: Path) -> None:
    """Log the place of parts of other settings, which may be wanted again, or in work."""
    for other in sorted(parent.parent.glob(".*.work")):
        if other != parent:
            logger.info(
                "parts of other settings, interrupted or in work, lie in %s: delete it if neither "
                "is so",
                other,
            )


@contextmanager
def finished_folder(output: Path) -> Iterator[tuple[Path, Listing]]:
    """Yield a new folder, and the listing in it, that replaces `output` once complete. After a
    failure only the list of dropped rows, if any, is left beside `output`."""
    rejects_beside(output).unlink(missing_ok=True)  # of an earlier attempt
    with new_folder(output) as folder:
        try:
            with Listing(rejects=folder / REJECTS, truncated=folder / TRUNCATED) as listing:
                yield folder, listing
        except UserError:
            if (folder / REJECTS).stat().st_size:
                shutil.copyfile(folder / REJECTS, rejects_beside(output))
            raise


def begin_shards(folder: Path, *, key: str) -> None:
    """Make a folder of shards for `key`; those of another one are removed."""
    mark = folder / BEGUN_WITH
    if not mark.is_file() or mark.read_text(encoding="utf-8") != key:
        remove_folder(folder)
        write_text(mark, key)


def remove_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def rejects_beside(output: Path) -> Path:
    """Return the path of the list of dropped rows if they stop the run."""
    return output.with_name(f"{output.name}.{REJECTS}")
