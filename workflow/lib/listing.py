"""Lists on disk of the rows that were dropped or cut, written while reading, so that memory stays small."""

import json
from collections import Counter
from pathlib import Path
from typing import Self

OVERLAP = "duplicate of a training row"  # why a held-out row is dropped


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
        """Finish both files."""
        self._rejects.close()
        self._truncated.close()

    def drop(self, *, file: str, row: int, reason: str, preview: str) -> None:
        """List a dropped row; what stands before the colon of `reason` is counted."""
        self.dropped_by_reason[reason.split(":")[0]] += 1
        line = {"file": file, "row": row, "reason": reason, "preview": preview}
        self._rejects.write(json.dumps(line, ensure_ascii=False) + "\n")

    def cut(self, *, file: str, row: int, tokens: int) -> None:
        """List a row that was cut and had `tokens` tokens before."""
        line = {"file": file, "row": row, "tokens": tokens}
        self._truncated.write(json.dumps(line, ensure_ascii=False) + "\n")
