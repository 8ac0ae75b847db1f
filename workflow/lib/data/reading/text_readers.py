"""JSON, CSV, TSV and plain text as chunks.

`MAX_ROW_BYTES` bounds memory for any file, except for the text of a JSON array."""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from workflow.lib.data.reading.compression import UnreadableError, open_bytes, read_head
from workflow.lib.data.reading.row_chunks import (
    MAX_ROW_BYTES,
    NOT_UTF8,
    UNDECODED,
    BrokenRow,
    Chunk,
    Parsed,
    Row,
    Unparsed,
    as_row,
    csv_row,
    json_row,
    parse_json,
    parse_json_at,
    preview,
    text_row,
    too_large,
)

BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 4 * 2**20  # a chunk ends here, even with few rows
# A row beyond `MAX_ROW_BYTES` is skipped, but the search for its end must end too: in a file
# without line feeds it would read the whole file.
MAX_SKIPPED_BYTES = 32 * MAX_ROW_BYTES
# Consecutive ones; a compressed megabyte can hold a thousand times as many.
MAX_BLANK_LINES = 1_000_000
MAX_JSON_BYTES = 2**31  # of an array, whose text is in memory
BLANKS = re.compile(r"[ \t\n\r]*")


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line, up to `MAX_ROW_BYTES` + 1, with its number, without the byte order mark that
    joined files have at the beginnings of their parts. Raises `UnreadableError` beyond
    `MAX_SKIPPED_BYTES`, or `MAX_BLANK_LINES` in a row."""
    number = blank = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        blank = blank + 1 if line.isspace() else 0
        if blank > MAX_BLANK_LINES:
            raise _too_many_blank_lines(before=f"line {number}")
        piece, size = line, len(line)
        while len(piece) > MAX_ROW_BYTES and not piece.endswith(b"\n"):
            _check_skipped(size, f"line {number}")
            piece = file.readline(MAX_ROW_BYTES + 1)
            size += len(piece)
        yield number, line.removeprefix(BOM)


def _check_skipped(size: int, item: str) -> None:
    if size > MAX_SKIPPED_BYTES:
        raise UnreadableError(
            f"{item} goes on for more than {MAX_SKIPPED_BYTES // 2**20} MiB, and a row may have "
            f"{MAX_ROW_BYTES // 2**20} MiB: the file lacks the breaks between its rows"
        )


def _too_many_blank_lines(*, before: str) -> UnreadableError:
    return UnreadableError(
        f"more than {MAX_BLANK_LINES:,} blank lines stand before {before}: they hold no rows"
    )


def _chunks(
    items: Iterable[tuple[int, Any]],
    parse: Callable[[int, Any], Row | BrokenRow],
    *,
    rows_per_chunk: int,
    size_of: Callable[[Any], int] = len,
) -> Iterator[Chunk]:
    """Yield numbered items in chunks. Blank lines are counted, and are no items."""
    batch, size, blank = list[tuple[int, Any]](), 0, 0
    for number, item in items:
        if isinstance(item, bytes) and not item.strip():
            blank += 1
            continue
        batch.append((number, item))
        size += size_of(item)
        if len(batch) >= rows_per_chunk or size >= CHUNK_BYTES:
            yield Unparsed(tuple(batch), parse, blank)
            batch, size, blank = [], 0, 0
    if batch or blank:
        yield Unparsed(tuple(batch), parse, blank)


def read_jsonl(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Yield the objects of a file with a JSON object a line."""
    with open_bytes(path) as file:
        yield from _chunks(numbered_lines(file), json_row, rows_per_chunk=rows_per_chunk)


def read_json(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Read an array of objects. A file whose first line is a whole object is read as JSON Lines.
    Raises `UnreadableError` for more than `MAX_JSON_BYTES`, and for broken JSON."""
    if read_head(path).removeprefix(BOM).lstrip()[:1] == b"{" and _first_line_is_whole(path):
        yield from read_jsonl(path, rows_per_chunk=rows_per_chunk)
        return
    with open_bytes(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise UnreadableError(
            f"a JSON array is read whole, and this one has more than {MAX_JSON_BYTES / 2**30:g} "
            "GiB; write it as JSON Lines, an object a line (jq -c '.[]')"
        )
    rows = _elements(content.decode("utf-8-sig", errors="surrogateescape"))
    while chunk := tuple(islice(rows, rows_per_chunk)):
        yield Parsed(chunk)


def _first_line_is_whole(path: Path) -> bool:
    with open_bytes(path) as file:
        line = next(line for _, line in numbered_lines(file) if line.strip())
    try:
        parse_json(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return False
    return True


def _elements(text: str) -> Iterator[Row | BrokenRow]:
    sign, position = _next_sign(text, 0)
    if sign != "[":
        raise UnreadableError(
            "it holds no JSON array of objects; one object a line is a .jsonl file"
        )
    number = 0
    sign, position = _next_sign(text, position + 1)
    while sign != "]":
        number += 1
        try:
            value, end = parse_json_at(text, position)
        except (ValueError, RecursionError) as error:
            raise UnreadableError(f"broken JSON in row {number}: {error}") from None
        yield _element(number, value, text[position:end])
        sign, position = _next_sign(text, end)
        if sign == ",":
            sign, position = _next_sign(text, position + 1)
        elif sign != "]":
            raise UnreadableError(f"broken JSON after row {number}: no comma")
    if _next_sign(text, position + 1)[0]:
        raise UnreadableError(f"more text follows the array of {number} rows")


def _next_sign(text: str, start: int) -> tuple[str, int]:
    """Return the next character that is not blank, empty at the end, and its place."""
    blanks = BLANKS.match(text, start)
    assert blanks is not None, "the pattern takes any text"
    return text[blanks.end() : blanks.end() + 1], blanks.end()


def _element(number: int, value: object, source: str) -> Row | BrokenRow:
    if len(source) > MAX_ROW_BYTES:
        return too_large(number, source)
    if UNDECODED.search(source):
        return BrokenRow(number, NOT_UTF8, preview(source))
    return as_row(number, value)


def read_text(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Yield the file as one text."""
    with open_bytes(path) as file:
        text = file.read(MAX_ROW_BYTES + 1).removeprefix(BOM).replace(b"\n" + BOM, b"\n")
    yield Unparsed(((1, text),), text_row)


def read_text_lines(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Every line is a text, without its line feed."""
    with open_bytes(path) as file:
        lines = ((n, line.rstrip(b"\r\n")) for n, line in numbered_lines(file))
        yield from _chunks(lines, text_row, rows_per_chunk=rows_per_chunk)


def read_text_paragraphs(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Blank lines separate the texts."""
    with open_bytes(path) as file:
        yield from _chunks(_paragraphs(file), text_row, rows_per_chunk=rows_per_chunk)


def _paragraphs(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    start, text, size = 0, bytearray(), 0
    for number, line in numbered_lines(file):
        if line.strip():
            start = start or number
            text += line[: max(0, MAX_ROW_BYTES + 1 - len(text))]
            size += len(line)
            _check_skipped(size, f"the paragraph at line {start}")
        elif start:
            yield start, bytes(text).rstrip(b"\r\n")
            start, text, size = 0, bytearray(), 0
    if start:
        yield start, bytes(text).rstrip(b"\r\n")


def read_csv(path: Path, *, rows_per_chunk: int, delimiter: str | None = None) -> Iterator[Chunk]:
    """Blank lines are no rows; without a `delimiter` the header decides it. Raises
    `UnreadableError` at a quote that never closes, or a header that repeats a name."""
    csv.field_size_limit(MAX_ROW_BYTES)  # process-wide; 131,072 characters otherwise
    with open_bytes(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        sign = delimiter or _separator(read_head(path))
        lines = _RecordLines(text)
        reader = csv.reader(lines, strict=True, delimiter=sign)
        try:
            header = tuple(next(reader, []))
            if repeated := sorted(name for name, count in Counter(header).items() if count > 1):
                raise UnreadableError(f"the header names {', '.join(repeated)} more than once")
            yield from _chunks(
                _records(reader, lines, header),
                partial(csv_row, header=header),
                rows_per_chunk=rows_per_chunk,
                size_of=lambda fields: sum(map(len, fields)),
            )
        except csv.Error as error:
            raise UnreadableError(f"broken CSV near line {reader.line_num}: {error}") from None


def _separator(head: bytes) -> str:
    """Return the semicolon if the header has it and no comma, as in spreadsheets with decimal
    commas; else the comma."""
    header = re.split(rb"[\r\n]", head.lstrip(), maxsplit=1)[0]
    return ";" if b";" in header and b"," not in header else ","


class _RecordLines:
    """The lines of a CSV file, with records bounded by the size of a row. Quoted fields may span
    any number of lines, so the consumer calls `begin_record` for each record."""

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._record_chars = 0

    def begin_record(self) -> None:
        self._record_chars = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._text.readline(MAX_ROW_BYTES + 1):
            self._record_chars += len(line)
            if self._record_chars > MAX_ROW_BYTES:
                raise csv.Error(f"a record is longer than {MAX_ROW_BYTES // 2**20} MiB")
            yield line.removeprefix(BOM.decode())


def _records(
    reader: Iterator[list[str]], lines: _RecordLines, header: tuple[str, ...]
) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with its number, without blank lines. Raises `UnreadableError` at a second
    header with the columns in another order (joined files)."""
    number, blank = 1, 0
    lines.begin_record()
    for fields in reader:
        lines.begin_record()
        blank = 0 if fields else blank + 1
        if blank > MAX_BLANK_LINES:
            raise _too_many_blank_lines(before=f"record {number}")
        if fields:
            if fields[0] in header and tuple(fields) != header and sorted(fields) == sorted(header):
                raise UnreadableError(
                    f"record {number} is a header with the columns in another order, as of two "
                    "joined files; divide them"
                )
            yield number, fields
            number += 1
