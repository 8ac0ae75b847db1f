"""Consecutive rows of a data file, passed from the reading process to encoding ones.

Reading a line takes a fiftieth of parsing it, so a chunk carries bytes, and `rows()` decodes and
parses them in the calling process. Chunks can be pickled. If a row's bytes cannot be found without
parsing (CSV, JSON arrays), a chunk carries parsed values.

A row is numbered from 1; in JSON Lines its number is its line. `row_formats` decides what the
columns mean."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

PREVIEW_CHARS = 160
# A larger row is refused unread, so that memory stays bounded: 8 bytes for each token of the
# longest training row (2^20). The tokenizers library takes 150 bytes for a byte of text (20 MB: 3.0
# GB, 2026-11-21).
MAX_ROW_BYTES = 8 * 2**20
MAX_DEPTH = 64  # of nested lists and objects; far below what would exhaust a recursion

# A row by column, as in its file: only `row_formats` knows what the columns hold.
Values = Mapping[str, object]


@dataclass(frozen=True)
class Row:
    """One object of the file: its number (from 1) and its values by column."""

    number: int
    value: Values

    @property
    def preview(self) -> str:
        """The row's first characters as JSON; other values (dates, bytes) as their text."""
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
    """Return `text` with escapes and bidirectional marks spelled out, which a terminal would obey
    or hide. So are lone surrogates, which no UTF-8 file can hold."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def preview(text: str) -> str:
    """Return the first `PREVIEW_CHARS` characters, printable."""
    return printable(text[:PREVIEW_CHARS])


def as_row(number: int, value: Any, *, brackets: int | None = None) -> Row | BrokenRow:
    """Return the row of a JSON value: broken unless it is an object of bounded depth. brackets: how
    many open in its text, if known; few cannot nest deeply."""
    if (brackets is None or brackets > MAX_DEPTH) and is_too_deep(value):
        return BrokenRow(number, f"nested too deeply: more than {MAX_DEPTH} levels", "")
    if isinstance(value, dict):
        return Row(number, value)
    return BrokenRow(
        number, f"not an object: {type(value).__name__}", preview(json.dumps(_start(value)))
    )


def is_too_deep(value: Any) -> bool:
    """Tell whether lists and objects nest more than `MAX_DEPTH` levels."""
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
    """Return the broken row of a text beyond `MAX_ROW_BYTES`; start: its beginning."""
    return BrokenRow(number, f"too large: more than {MAX_ROW_BYTES // 2**20} MiB", preview(start))


NOT_UTF8 = "invalid UTF-8"
UNDECODED = re.compile(
    "[\udc80-\udcff]"
)  # bytes that are no UTF-8, as `surrogateescape` reads them


class Chunk(Protocol):
    """Some consecutive rows of one file."""

    @property
    def blank_lines(self) -> int:
        """Lines of the chunk without a row, in files with a row a line."""
        ...

    def rows(self) -> list[Row | BrokenRow]:
        """Return the rows in order, without blank lines."""
        ...


@dataclass(frozen=True)
class Unparsed:
    """Items of a file, each with its number, and the function that makes a row of one."""

    items: tuple[tuple[int, Any], ...]
    parse: Callable[[int, Any], Row | BrokenRow]
    blank_lines: int = 0

    def rows(self) -> list[Row | BrokenRow]:
        return [self.parse(number, item) for number, item in self.items]


def json_row(number: int, line: bytes) -> Row | BrokenRow:
    """Return the row of a line, of a too long one its first `MAX_ROW_BYTES` + 1."""
    if len(line) > MAX_ROW_BYTES:
        return too_large(number, _shown(line))
    try:
        value = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"{NOT_UTF8}: byte {error.start + 1} of the line"
        return BrokenRow(number, reason, preview(_shown(line)))
    except (ValueError, RecursionError) as error:
        return BrokenRow(number, f"broken JSON: {error}", preview(_shown(line)))
    brackets = line.count(b"{") + line.count(b"[")
    return as_row(number, value, brackets=brackets)


def _shown(line: bytes) -> str:
    return line[: 4 * PREVIEW_CHARS].decode("utf-8", errors="replace").strip()


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse duplicate keys, which readers would understand differently."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has the same key twice")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys)
parse_json = _DECODER.decode
parse_json_at = _DECODER.raw_decode


def text_row(number: int, text: bytes) -> Row | BrokenRow:
    """Return a row with one column, `text`; number: of its first line."""
    if len(text) > MAX_ROW_BYTES:
        large = too_large(number, _shown(text))
        hint = "; data.file_type text_paragraphs or text_lines reads it in parts"
        return replace(large, reason=large.reason + hint)
    try:
        return Row(number, {"text": text.decode("utf-8")})
    except UnicodeDecodeError as error:
        reason = f"{NOT_UTF8}: byte {error.start + 1} of the text"
        return BrokenRow(number, reason, preview(_shown(text)))


def csv_row(number: int, fields: list[str], *, header: tuple[str, ...]) -> Row | BrokenRow:
    """Return the row of a record; bytes that are no UTF-8 are lone surrogates in it."""
    text = ",".join(fields)
    if UNDECODED.search(text):
        return BrokenRow(number, NOT_UTF8, preview(text))
    if len(fields) != len(header):
        reason = f"wrong number of fields: {len(fields)}, the header has {len(header)}"
        return BrokenRow(number, reason, preview(text))
    if [name.strip().lower() for name in fields] == [name.strip().lower() for name in header]:
        return BrokenRow(number, "header again: the names of the columns, as in joined files", text)
    return Row(number, dict(zip(header, fields, strict=True)))


@dataclass(frozen=True)
class Parsed:
    parsed: tuple[Row | BrokenRow, ...]
    blank_lines: int = 0

    def rows(self) -> list[Row | BrokenRow]:
        return list(self.parsed)
