"""A row of a data file, whole or broken, with its number; and text of the data as it may be shown.

A row is numbered from 1; in JSON Lines its number is its line. What the columns mean is decided in
`row_formats`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREVIEW_CHARS = 160
# A row beyond this is refused unread, so that memory stays bounded whatever a file holds: 8 bytes
# for each token of the longest training row (2^20). The tokenizers library takes 150 bytes for a
# byte of text (20 MB: 3.0 GB, 2026-11-21).
MAX_ROW_BYTES = 8 * 2**20
MAX_DEPTH = 64  # of lists and objects in each other; far below what would exhaust a recursion

# A row by column, as its file has it: what the columns hold is not known before `row_formats`.
Values = Mapping[str, object]


@dataclass(frozen=True)
class Row:
    """One object of the file: its number (from 1) and its values by column."""

    number: int
    value: Values

    @property
    def preview(self) -> str:
        """The row's first characters as JSON; what JSON cannot hold (dates, bytes) as its text."""
        shown = {k: _start(v) for k, v in self.value.items()}
        return preview(json.dumps(shown, ensure_ascii=False, default=str))


@dataclass(frozen=True)
class BrokenRow:
    """A row that holds no object: number (from 1), reason (`kind: detail`), first characters."""

    number: int
    reason: str
    preview: str


def _start(value: Any) -> Any:
    return value[:PREVIEW_CHARS] if isinstance(value, str) else value


def printable(text: str) -> str:
    """Return `text` with escapes and bidirectional marks spelled out. A terminal would obey or hide
    these. Lone surrogates, which no UTF-8 file can hold, are spelled out too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def preview(text: str) -> str:
    return printable(text[:PREVIEW_CHARS])


def as_row(number: int, value: Any, *, brackets: int | None = None) -> Row | BrokenRow:
    """Return the row of a JSON value: broken unless it is an object of bounded depth. brackets: how
    many open in its text, where that is known; few cannot nest deeply."""
    if (brackets is None or brackets > MAX_DEPTH) and is_too_deep(value):
        return BrokenRow(number, f"nested too deeply: more than {MAX_DEPTH} levels", "")
    if isinstance(value, dict):
        return Row(number, value)
    return BrokenRow(
        number, f"not an object: {type(value).__name__}", preview(json.dumps(_start(value)))
    )


def is_too_deep(value: Any) -> bool:
    """Tell whether lists and objects nest deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for outer in level
            if isinstance(outer, dict | list)
            for child in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def too_large(number: int, start: str) -> BrokenRow:
    """Return the broken row of a text beyond `MAX_ROW_BYTES`, of which `start` is the beginning."""
    return BrokenRow(number, f"too large: more than {MAX_ROW_BYTES // 2**20} MiB", preview(start))
