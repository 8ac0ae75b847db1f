"""JSON Lines, CSV, TSV and plain text as chunks, in memory bounded by `MAX_ROW_BYTES` whatever a file holds."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from workflow.lib.byte_streams import open_bytes, read_head
from workflow.lib.chunks import Chunk, CsvRecords, JsonLines, TextBlocks
from workflow.lib.rows import MAX_ROW_BYTES

BOM = b"\xef\xbb\xbf"
CHUNK_BYTES = 4 * 2**20  # a chunk ends here, however few its rows are


class UnreadableError(ValueError):
    """A file that cannot be read on from some point; the message says why."""


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number; of one beyond `MAX_ROW_BYTES`, its beginning and one byte more."""
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_ROW_BYTES + 1)
        yield number, line.removeprefix(BOM) if number == 1 else line


def read_jsonl(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Blank lines are no rows; they count as lines."""
    with open_bytes(path) as file:
        first, lines, size = 1, list[bytes](), 0
        for number, line in numbered_lines(file):
            lines.append(line)
            size += len(line)
            if len(lines) >= rows_per_chunk or size >= CHUNK_BYTES:
                yield JsonLines(first, tuple(lines))
                first, lines, size = number + 1, [], 0
        if lines:
            yield JsonLines(first, tuple(lines))


def read_text(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """The file is one text."""
    with open_bytes(path) as file:
        yield TextBlocks((1,), (file.read(MAX_ROW_BYTES + 1).removeprefix(BOM),))


def read_text_lines(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Every line is a text, without its line feed; blank ones are none."""
    with open_bytes(path) as file:
        lines = ((n, line.rstrip(b"\r\n")) for n, line in numbered_lines(file) if line.strip())
        yield from _blocks(lines, rows_per_chunk=rows_per_chunk)


def read_text_paragraphs(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Blank lines part the texts."""
    with open_bytes(path) as file:
        yield from _blocks(_paragraphs(file), rows_per_chunk=rows_per_chunk)


def _paragraphs(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield paragraphs with the number of their first line; of one beyond `MAX_ROW_BYTES`, its beginning."""
    start, text = 0, bytearray()
    for number, line in numbered_lines(file):
        if line.strip():
            start = start or number
            text += line[: max(0, MAX_ROW_BYTES + 1 - len(text))]
        elif start:
            yield start, bytes(text).rstrip(b"\r\n")
            start, text = 0, bytearray()
    if start:
        yield start, bytes(text).rstrip(b"\r\n")


def _blocks(texts: Iterator[tuple[int, bytes]], *, rows_per_chunk: int) -> Iterator[Chunk]:
    kept: list[tuple[int, bytes]] = []
    size = 0
    for number, text in texts:
        kept.append((number, text))
        size += len(text)
        if len(kept) >= rows_per_chunk or size >= CHUNK_BYTES:
            yield TextBlocks(*zip(*kept, strict=True))
            kept, size = [], 0
    if kept:
        yield TextBlocks(*zip(*kept, strict=True))


def read_csv(path: Path, *, rows_per_chunk: int, delimiter: str | None = None) -> Iterator[Chunk]:
    """Blank lines are no rows; without a `delimiter` the header tells it.

    Raises `UnreadableError` at a quote that never closes, or a header that repeats a name.
    """
    csv.field_size_limit(MAX_ROW_BYTES)  # process-wide; 131,072 characters otherwise
    with open_bytes(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        sign = delimiter or _separator(read_head(path))
        reader = csv.reader(_bounded_lines(text), strict=True, delimiter=sign)
        try:
            header = tuple(next(reader, []))
            _check_header(header)
            yield from _records(reader, header, rows_per_chunk=rows_per_chunk)
        except csv.Error as error:
            raise UnreadableError(f"broken CSV near line {reader.line_num}: {error}") from None


def _separator(head: bytes) -> str:
    """Return the comma, or the semicolon that spreadsheets write where numbers have decimal commas."""
    header = head.lstrip().split(b"\n")[0]
    return ";" if b";" in header and b"," not in header else ","


def read_tsv(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """As CSV, with tabs."""
    return read_csv(path, rows_per_chunk=rows_per_chunk, delimiter="\t")


def _bounded_lines(text: TextIO) -> Iterator[str]:
    while line := text.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            raise csv.Error(f"a line is longer than {MAX_ROW_BYTES // 2**20} MiB")
        yield line


def _check_header(header: tuple[str, ...]) -> None:
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise UnreadableError(f"the header names {', '.join(repeated)} more than once")


def _records(
    reader: Iterator[list[str]], header: tuple[str, ...], *, rows_per_chunk: int
) -> Iterator[Chunk]:
    first, records, size = 1, list[list[str]](), 0
    for fields in reader:
        if fields:
            records.append(fields)
            size += sum(map(len, fields))
        if len(records) >= rows_per_chunk or size >= CHUNK_BYTES:
            yield CsvRecords(first, header, tuple(records))
            first, records, size = first + len(records), [], 0
    if records:
        yield CsvRecords(first, header, tuple(records))
