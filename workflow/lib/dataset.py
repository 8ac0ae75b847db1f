"""Rows of a data file, one at a time, with their numbers; broken rows are reported, never skipped.

A reader yields a `Row` per row, or a `BrokenRow` where the bytes are no usable object. What makes the
whole file unusable (another kind of file, cut off, an open quote to the end) raises `UserError` instead.
What the columns mean is decided in `samples`. A row is numbered from 1; in JSON Lines its number is its line.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from workflow.lib.errors import UserError, setting_error

PREVIEW_CHARS = 160
COLUMN_SCAN_ROWS = 100  # rows whose keys decide which columns a JSON file has
PARQUET_BATCH_ROWS = 1024

# First bytes of what people mistake for a data file.
SIGNATURES: dict[bytes, str] = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"PAR1": "Parquet",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b": "gzip-compressed",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"PK\x03\x04": "a ZIP archive",
    b"%PDF": "a PDF document",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"version https://git-lfs": "a Git LFS pointer, whose content was never fetched (git lfs pull)",
}


@dataclass(frozen=True)
class Row:
    """One object of the file: its number (from 1) and its values by column."""

    number: int
    value: dict[str, Any]

    @property
    def preview(self) -> str:
        """The row's first characters as JSON; what JSON cannot hold (dates, bytes) as its text."""
        return preview(json.dumps(self.value, ensure_ascii=False, default=str))


@dataclass(frozen=True)
class BrokenRow:
    """A row that holds no object: its number (from 1), why (`kind` or `kind: detail`), and its first characters."""

    number: int
    reason: str
    preview: str


def preview(text: str) -> str:
    """Cut `text` for a listing; lone surrogates, which no UTF-8 file can hold, become question marks."""
    return text[:PREVIEW_CHARS].encode("utf-8", errors="replace").decode()


def read_rows(path: Path, *, setting: str) -> Iterator[Row | BrokenRow]:
    """Yield every row of a .jsonl, .json, .csv or .parquet file in order.

    `setting` is the key that names the file, for messages. Raises `UserError` if the extension is
    unknown, the content is of another kind, or the file cannot be read on from some point.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise setting_error(
            setting,
            str(path),
            f"the extension {path.suffix!r} is none of {', '.join(READERS)}",
            "Convert the file, or name it for what it holds",
        )
    _check_content(path, setting=setting)
    yield from reader(path, setting)


def column_names(path: Path, *, setting: str) -> list[str]:
    """Return the columns of the first `COLUMN_SCAN_ROWS` objects, in the order of appearance.

    Empty if no row of the file is an object. Raises `UserError` as `read_rows` does, and if the file
    holds no row at all.
    """
    rows = read_rows(path, setting=setting)
    first = next(rows, None)
    if first is None:
        raise setting_error(setting, str(path), "the file holds no row", "Name a file with rows")
    objects = (row.value for row in chain([first], rows) if isinstance(row, Row))
    return list(dict.fromkeys(chain.from_iterable(islice(objects, COLUMN_SCAN_ROWS))))


def _check_content(path: Path, *, setting: str) -> None:
    """Refuse a file whose first bytes are not what its extension promises."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror})"
        raise setting_error(setting, str(path), reason, "Name a readable file") from None
    suffix = path.suffix.lower()
    kind = next((name for start, name in SIGNATURES.items() if head.startswith(start)), None)
    if suffix == ".parquet":
        wrong = None if head[:4] == b"PAR1" else kind or "not Parquet (it lacks the mark PAR1)"
    else:
        wrong = kind or ("binary data" if b"\0" in head else None)
        if suffix == ".jsonl" and head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            wrong = "one JSON array, which belongs into a .json file"
    if wrong is not None:
        raise setting_error(
            setting, str(path), f"the content is {wrong}", f"Name a {suffix} file that is one"
        )


def _read_jsonl(path: Path, setting: str) -> Iterator[Row | BrokenRow]:
    """Blank lines are no rows; they count as lines."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            raw = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if raw.strip():
                yield _parse_line(number, raw)


def _parse_line(number: int, raw: bytes) -> Row | BrokenRow:
    shown = preview(raw[: 4 * PREVIEW_CHARS].decode("utf-8", errors="replace").strip())
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BrokenRow(number, f"invalid UTF-8: byte {error.start + 1} of the line", shown)
    except (ValueError, RecursionError) as error:
        return BrokenRow(number, f"broken JSON: {error}", shown)
    return _object(number, value)


def _object(number: int, value: Any) -> Row | BrokenRow:
    if isinstance(value, dict):
        return Row(number, value)
    kind = type(value).__name__
    return BrokenRow(number, f"not an object: {kind}", preview(json.dumps(value)))


def _read_json(path: Path, setting: str) -> Iterator[Row | BrokenRow]:
    """The text is held in memory, its objects one at a time."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _cut_off(path, setting, f"invalid UTF-8 at byte {error.start + 1}") from None
    place = _skip_blanks(text, 0)
    if text[place : place + 1] != "[":
        reason = "it holds no JSON array of objects"
        raise _cut_off(path, setting, reason + "; one object a line is a .jsonl file")
    place, number = _skip_blanks(text, place + 1), 0
    decoder = json.JSONDecoder()
    while text[place : place + 1] != "]":
        number += 1
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise _cut_off(path, setting, f"broken JSON in row {number}: {error}") from None
        yield _object(number, value)
        place = _skip_blanks(text, place)
        if text[place : place + 1] == ",":
            place = _skip_blanks(text, place + 1)
        elif text[place : place + 1] != "]":
            raise _cut_off(path, setting, f"broken JSON after row {number}: no comma")
    if text[place + 1 :].strip():
        raise _cut_off(path, setting, f"more text follows the array of {number} rows")


def _skip_blanks(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t", "\n", "\r"):
        place += 1
    return place


def _read_csv(path: Path, setting: str) -> Iterator[Row | BrokenRow]:
    csv.field_size_limit(sys.maxsize)  # a process-wide limit of 131,072 characters otherwise
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            _check_header(header, path, setting)
            for number, fields in enumerate((f for f in reader if f), start=1):
                yield _csv_row(number, header, fields)
        except csv.Error as error:
            reason = f"broken CSV near line {reader.line_num}: {error}"
            raise _cut_off(path, setting, reason) from None


def _check_header(header: list[str], path: Path, setting: str) -> None:
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise _cut_off(path, setting, f"the header names {', '.join(repeated)} more than once")


def _csv_row(number: int, header: list[str], fields: list[str]) -> Row | BrokenRow:
    text = ",".join(fields)
    if any("\udc80" <= char <= "\udcff" for char in text):
        return BrokenRow(number, "invalid UTF-8", preview(text))
    if len(fields) != len(header):
        reason = f"wrong number of fields: {len(fields)}, the header has {len(header)}"
        return BrokenRow(number, reason, preview(text))
    return Row(number, dict(zip(header, fields, strict=True)))


def _read_parquet(path: Path, setting: str) -> Iterator[Row | BrokenRow]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number, value)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = f"Parquet cannot be read after row {number}: {error}"
        raise _cut_off(path, setting, reason) from None


def _cut_off(path: Path, setting: str, reason: str) -> UserError:
    return setting_error(setting, str(path), reason, "Repair the file")


READERS: dict[str, Callable[[Path, str], Iterator[Row | BrokenRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
