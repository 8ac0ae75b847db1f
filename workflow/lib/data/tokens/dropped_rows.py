"""Lists on disk of rows that were dropped or cut.

They are written while reading, so that memory stays small."""

from collections import Counter
from pathlib import Path
from typing import Any, Self

from workflow.lib.system.artifact_files import checked_line

# Why a held-out row is dropped.
OVERLAP = "duplicate of a training row"
SHARED_GROUP = "group of a training row"
NEAR_DUPLICATE = "near-duplicate of a training row"


Line = dict[str, Any]
"""Of a list, without its file. Of `rejects.jsonl`: number of the `row`, `reason`, `preview` (first
characters). Of `truncated.jsonl`: a `row` of `tokens` became `documents` of `kept` tokens."""


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

    def drop(self, line: Line, *, file: str) -> None:
        self.dropped_by_reason[reason_kind(line["reason"])] += 1
        self._rejects.write(checked_line({"file": file, **line}))

    def cut(self, line: Line, *, file: str) -> None:
        self._truncated.write(checked_line({"file": file, **line}))
