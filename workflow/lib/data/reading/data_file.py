"""Rows of a data file of any type, in order; broken rows are reported, never skipped.

A reader yields chunks of rows; a row without a usable object is a `BrokenRow`. A fault of the whole
file (another type, cut off, an open quote to the end) raises `UserError` instead."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from workflow.lib.data.reading.chunks import BrokenRow, Chunk, Row
from workflow.lib.data.reading.compression import UnreadableError, file_type_of, read_head
from workflow.lib.data.reading.sources import SourceFile
from workflow.lib.data.reading.table_readers import read_arrow, read_parquet
from workflow.lib.data.reading.text_readers import (
    BOM,
    read_csv,
    read_json,
    read_jsonl,
    read_text,
    read_text_lines,
    read_text_paragraphs,
    read_tsv,
)
from workflow.lib.settings.data import FileType
from workflow.lib.system.errors import setting_error

COLUMN_SCAN_ROWS = 100  # rows whose keys decide which columns a source has
ROWS_PER_CHUNK = 1024

# First bytes of files that people mistake for data files.
SIGNATURES: dict[bytes, str] = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"PAR1": "Parquet",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b": "gzip-compressed",
    b"\x28\xb5\x2f\xfd": "zstd-compressed",
    b"BZh": "bzip2-compressed",
    b"\xfd7zXZ\0": "xz-compressed",
    b"PK\x03\x04": "a ZIP archive",
    b"%PDF": "a PDF document",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
    b"version https://git-lfs": "a Git LFS pointer, whose content was never fetched (git lfs pull)",
}
READERS: dict[FileType, Callable[..., Iterator[Chunk]]] = {
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "tsv": read_tsv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "text": read_text,
    "text_lines": read_text_lines,
    "text_paragraphs": read_text_paragraphs,
}


def read_chunks(
    path: Path,
    *,
    setting: str,
    file_type: FileType | None = None,
    rows_per_chunk: int = ROWS_PER_CHUNK,
) -> Iterator[Chunk]:
    """Yield the rows of a file in order, in chunks of at most `rows_per_chunk`, the same every
    time. setting: the key that names the file, for messages; file_type: None takes it from the
    name. Raises `UserError` if the type is unknown or unlike the content, or the file cannot be
    read further."""
    kind = file_type or file_type_of(path, setting=setting)
    try:
        _check_content(path, kind, setting=setting)
        yield from READERS[kind](path, rows_per_chunk=rows_per_chunk)
    except UnreadableError as error:
        raise setting_error(setting, str(path), str(error), "Repair the file") from None
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror or error})"
        raise setting_error(setting, str(path), reason, "Name a readable file") from None


def read_rows(
    path: Path, *, setting: str, file_type: FileType | None = None
) -> Iterator[Row | BrokenRow]:
    for chunk in read_chunks(path, setting=setting, file_type=file_type):
        yield from chunk.rows()


def column_names(files: Iterable[SourceFile], *, setting: str) -> list[str]:
    """Return the columns of the first `COLUMN_SCAN_ROWS` objects, in order of appearance; empty if
    no row is an object. Raises `UserError` as `read_rows`, and if there is no row at all."""
    rows = chain.from_iterable(
        read_rows(file.path, setting=setting, file_type=file.file_type) for file in files
    )
    first = next(rows, None)
    if first is None:
        names = ", ".join(file.file for file in islice(files, 3))
        raise setting_error(setting, names, "the file holds no row", "Name a file with rows")
    objects = (row.value for row in chain([first], rows) if isinstance(row, Row))
    return list(dict.fromkeys(chain.from_iterable(islice(objects, COLUMN_SCAN_ROWS))))


def _check_content(path: Path, kind: FileType, *, setting: str) -> None:
    head = read_head(path)
    signature = next((name for start, name in SIGNATURES.items() if head.startswith(start)), None)
    fault = signature or _content_fault(kind, head)
    if kind == "parquet":
        fault = None if head[:4] == b"PAR1" else signature or "not Parquet (it lacks the mark PAR1)"
    elif kind == "arrow":
        fault = None if signature == "an Arrow file" else signature
    if fault is not None:
        raise setting_error(
            setting, str(path), f"the content is {fault}", f"Name a .{kind} file that is one"
        )


def _content_fault(kind: FileType, head: bytes) -> str | None:
    start = head.removeprefix(BOM).lstrip()[:1]
    if kind == "jsonl" and start == b"[":
        return "one JSON array, which belongs into a .json file"
    is_json = kind in ("jsonl", "json") and start in (b"{", b"[")
    return "binary data" if b"\0" in head and not is_json else None
