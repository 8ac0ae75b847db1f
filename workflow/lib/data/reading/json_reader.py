"""A JSON array of objects, read as a stream: one element's text is in memory at a time.

The standard decoder fails at a buffer's end within an element, or at a string whose end it does not
see: then more is read, in doubling buffers. An error anywhere else is the file's."""

import io
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from workflow.lib.data.reading.chunks import (
    NOT_UTF8,
    Chunk,
    Parsed,
    holds_undecoded,
    parse_json,
    parse_json_at,
)
from workflow.lib.data.reading.compression import UnreadableError, open_bytes, read_head
from workflow.lib.data.reading.row import MAX_ROW_BYTES, BrokenRow, Row, as_row, preview
from workflow.lib.data.reading.text_readers import BOM, numbered_lines, read_jsonl

BUFFER_CHARS = 2**20
# The decoder stops at most this far from the end of a cut literal, number or escape.
TAIL_CHARS = 16
BLANKS = re.compile(r"[ \t\n\r]*")


def read_json(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Read an array of objects. A file that begins with an object that ends with its line is read
    as JSON Lines. Raises `UnreadableError` where the array cannot be read on."""
    if read_head(path).removeprefix(BOM).lstrip()[:1] == b"{" and _first_line_is_whole(path):
        yield from read_jsonl(path, rows_per_chunk=rows_per_chunk)
        return
    with open_bytes(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape")
        rows = _elements(_Buffer(text))
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


class _Buffer:
    """The unread text of a file: `text` from `position` on, and what `more` brings."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.text = ""
        self.position = 0
        self.ended = False

    def more(self) -> None:
        """Drop what was read, and read on: at least as much as is left."""
        self.text = self.text[self.position :]
        self.position = 0
        added = self._file.read(max(BUFFER_CHARS, len(self.text)))
        self.ended = not added
        self.text += added

    def peek(self) -> str:
        """Return the next character that is not blank, without taking it; empty at the end."""
        blanks = 0
        while True:
            blank_run = BLANKS.match(self.text, self.position)
            assert blank_run is not None, "the pattern takes any text"
            blanks += blank_run.end() - self.position
            self.position = blank_run.end()
            if self.position < len(self.text) or self.ended:
                return self.text[self.position : self.position + 1]
            if blanks > MAX_ROW_BYTES:
                raise UnreadableError(
                    f"more than {MAX_ROW_BYTES // 2**20} MiB of blanks follow each other"
                )
            self.more()

    def element(self, number: int) -> tuple[Any, str]:
        """Take the JSON value at the position; return it with its text."""
        while True:
            try:
                value, end = parse_json_at(self.text, self.position)
            except json.JSONDecodeError as error:
                if self.ended or not self._is_cut(error):
                    raise _broken(number, error) from None
            except (ValueError, RecursionError) as error:
                raise _broken(number, error) from None
            else:
                if end < len(self.text) or self.ended:  # else a number may go on
                    source, self.position = self.text[self.position : end], end
                    return value, source
            if len(self.text) - self.position > MAX_ROW_BYTES:
                raise UnreadableError(f"row {number} is larger than {MAX_ROW_BYTES // 2**20} MiB")
            self.more()

    def _is_cut(self, error: json.JSONDecodeError) -> bool:
        near_end = error.pos >= len(self.text) - TAIL_CHARS
        return near_end or error.msg.startswith("Unterminated string")


def _broken(number: int, error: Exception) -> UnreadableError:
    return UnreadableError(f"broken JSON in row {number}: {error}")


def _elements(buffer: _Buffer) -> Iterator[Row | BrokenRow]:
    if buffer.peek() != "[":
        raise UnreadableError(
            "it holds no JSON array of objects; one object a line is a .jsonl file"
        )
    buffer.position += 1
    number = 0
    while buffer.peek() != "]":
        number += 1
        value, source = buffer.element(number)
        if holds_undecoded(source):
            yield BrokenRow(number, NOT_UTF8, preview(source))
        else:
            yield as_row(number, value)
        if buffer.peek() == ",":
            buffer.position += 1
        elif buffer.peek() != "]":
            raise UnreadableError(f"broken JSON after row {number}: no comma")
    buffer.position += 1
    if buffer.peek():
        raise UnreadableError(f"more text follows the array of {number} rows")
