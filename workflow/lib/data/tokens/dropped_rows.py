"""Lists on disk of rows that were dropped or cut.

They are written while reading, so that memory stays small."""

from collections import Counter
from pathlib import Path
from typing import Self, TypedDict

from workflow.lib.system.artifact_files import checked_line

# Why a held-out row is dropped.
OVERLAP = "duplicate of a training row"
SHARED_GROUP = "group of a training row"
NEAR_DUPLICATE = "near-duplicate of a training row"


class DroppedRow(TypedDict):
    """A line of `rejects.jsonl` without its file: number of the row, reason, first characters."""

    row: int
    reason: str
    preview: str


class CutRow(TypedDict):
    """A line of `truncated.jsonl`: a row of `tokens` became `documents` of `kept` tokens."""

    row: int
    tokens: int
    documents: int
    kept: int


def reason_kind(reason: str) -> str:
    """Return the part of a reason by which dropped rows are counted."""
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

    def drop(self, row: DroppedRow, *, file: str) -> None:
        self.dropped_by_reason[reason_kind(row["reason"])] += 1
        line = {"file": file, "row": row["row"], "reason": row["reason"], "preview": row["preview"]}
        self._rejects.write(checked_line(line))

    def cut(self, row: CutRow, *, file: str) -> None:
        line = {
            "file": file,
            "row": row["row"],
            "tokens": row["tokens"],
            "documents": row["documents"],
            "kept": row["kept"],
        }
        self._truncated.write(checked_line(line))
