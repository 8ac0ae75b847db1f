"""Rows of a data file of any type, in order; broken rows are reported, never skipped.

A reader yields chunks of rows; a row without a usable object is a `BrokenRow`. A fault of the whole
file (another type, cut off, an open quote to the end) raises `UserError` instead.

Parquet and Arrow are read here, a batch at a time, with the values that `datasets` gives (whose own
reader knows no numbers of broken rows): columns of type JSON are decoded, a map becomes an object.
`text_readers` has the other types."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from workflow.lib.data.reading.compression import (
    UnreadableError,
    compression_of,
    file_type_of,
    open_seekable,
    read_head,
)
from workflow.lib.data.reading.row_chunks import (
    MAX_ROW_BYTES,
    NOT_UTF8,
    BrokenRow,
    Chunk,
    Row,
    as_row,
    parse_json,
    too_large,
)
from workflow.lib.data.reading.sources import SourceFile
from workflow.lib.data.reading.text_readers import (
    BOM,
    CHUNK_BYTES,
    read_csv,
    read_json,
    read_jsonl,
    read_text,
    read_text_lines,
    read_text_paragraphs,
)
from workflow.lib.settings.data import FileType
from workflow.lib.system.errors import setting_error

ARROW_FILE_MARK = b"ARROW1"
# Of each column at a time; pyarrow reads a row group's whole columns otherwise.
COLUMN_BUFFER_BYTES = 2**20
# Errors of Arrow or JSON for a value that is not of its type.
BROKEN_VALUES = (ValueError, KeyError, RecursionError)


def read_parquet(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Yield the rows of a Parquet file. Raises `UnreadableError` where it is damaged."""
    with open_seekable(path) as raw:
        first = 1
        try:
            with pyarrow.parquet.ParquetFile(
                raw,
                buffer_size=COLUMN_BUFFER_BYTES,
                pre_buffer=False,
                arrow_extensions_enabled=True,
            ) as file:
                about = file.metadata
                groups = [about.row_group(number) for number in range(about.num_row_groups)]
                num_bytes = sum(group.total_byte_size for group in groups)  # not compressed
                step = _rows_that_fit(num_bytes, about.num_rows, rows_per_chunk)
                for batch in file.iter_batches(batch_size=step):
                    yield table_rows(first, batch)
                    first += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise UnreadableError(
                f"Parquet cannot be read after row {first - 1}: {error}"
            ) from None


def read_arrow(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Yield the rows of an Arrow IPC file or stream. Raises `UnreadableError` where it is
    damaged."""
    first = 1
    with _arrow_source(path) as source:
        try:
            for batch in _batches(source):
                batch.validate(full=True)  # pyarrow believes a damaged file, and crashes
                step = _rows_that_fit(batch.nbytes, batch.num_rows, rows_per_chunk)
                for start in range(0, batch.num_rows, step):
                    part = batch.slice(start, step)
                    yield table_rows(first, part)
                    first += part.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise UnreadableError(f"Arrow cannot be read after row {first - 1}: {error}") from None


def _rows_that_fit(num_bytes: int, num_rows: int, rows_per_chunk: int) -> int:
    return max(1, min(rows_per_chunk, CHUNK_BYTES * num_rows // max(1, num_bytes)))


def _arrow_source(path: Path) -> Any:
    """Map a plain file into memory: a batch of any size takes none until it is read."""
    if compression_of(path) is None:
        return pyarrow.memory_map(str(path))
    return pyarrow.PythonFile(open_seekable(path), mode="r")


def _batches(source: Any) -> Iterator[pyarrow.RecordBatch]:
    is_file = source.read(len(ARROW_FILE_MARK)) == ARROW_FILE_MARK
    source.seek(0)
    if not is_file:
        yield from pyarrow.ipc.open_stream(source)
        return
    reader = pyarrow.ipc.open_file(source)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


@dataclass(frozen=True)
class TableRows:
    """Rows of a table from row `first`, as an Arrow stream: a pickle would drag its file."""

    first: int
    stream: bytes
    blank_lines: int = 0

    def rows(self) -> list[Row | BrokenRow]:
        table = pyarrow.ipc.open_stream(self.stream).read_all()
        if len(self.stream) > MAX_ROW_BYTES:
            return [self._large_row(table, index) for index in range(table.num_rows)]
        try:
            values = _values(table)
        except BROKEN_VALUES:
            return [self._row(table, index) for index in range(table.num_rows)]
        has_json = any(_holds_json(column.type) for column in table.schema)
        make = as_row if has_json else Row  # only JSON can nest deeply
        return [make(number, value) for number, value in enumerate(values, start=self.first)]

    def _large_row(self, table: pyarrow.Table, index: int) -> Row | BrokenRow:
        if table.slice(index, 1).nbytes > MAX_ROW_BYTES:
            return too_large(self.first + index, "")
        return self._row(table, index)

    def _row(self, table: pyarrow.Table, index: int) -> Row | BrokenRow:
        number = self.first + index
        try:
            (value,) = _values(table.slice(index, 1))
        except UnicodeDecodeError:
            return BrokenRow(number, NOT_UTF8, "")
        except BROKEN_VALUES as error:
            return BrokenRow(number, f"broken value: {error}", "")
        return as_row(number, value)


def table_rows(first: int, batch: pyarrow.RecordBatch) -> TableRows:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return TableRows(first, sink.getvalue().to_pybytes())


def _values(table: pyarrow.Table) -> list[dict[str, Any]]:
    """Return each row's values by column. Raises one of `BROKEN_VALUES`."""
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    for column in table.schema:
        if _holds_json(column.type):
            for row in rows:
                row[column.name] = _decoded(row[column.name], column.type)
    return rows


@cache
def _holds_json(kind: pyarrow.DataType) -> bool:
    if isinstance(kind, pyarrow.StructType):
        return any(_holds_json(field.type) for field in kind)
    inner = _inner_type(kind)
    return isinstance(kind, pyarrow.JsonType) or (inner is not None and _holds_json(inner))


def _inner_type(kind: Any) -> pyarrow.DataType | None:
    """Return the type of the values in a map, a list of any kind or a dictionary."""
    return getattr(kind, "item_type", getattr(kind, "value_type", None))


def _decoded(value: Any, kind: Any) -> Any:
    """Return a value of this type with its JSON texts decoded."""
    if value is None or not _holds_json(kind):
        return value
    if isinstance(kind, pyarrow.JsonType):
        return parse_json(value)
    if isinstance(kind, pyarrow.StructType):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    inner = _inner_type(kind)
    if isinstance(value, dict):
        return {key: _decoded(item, inner) for key, item in value.items()}
    return [_decoded(item, inner) for item in value]


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
    "tsv": partial(read_csv, delimiter="\t"),
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
    """Yield the rows of `read_chunks` one by one."""
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
