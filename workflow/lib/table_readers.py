"""Parquet and Arrow files as chunks, a batch at a time; an Arrow file is an IPC file (Feather) or an IPC stream."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from workflow.lib.byte_streams import open_seekable
from workflow.lib.chunks import Chunk, table_rows
from workflow.lib.file_types import compression_of
from workflow.lib.text_readers import UnreadableError

ARROW_FILE_MARK = b"ARROW1"
COLUMN_BUFFER_BYTES = (
    2**20
)  # of each column at a time; pyarrow reads a row group's whole columns otherwise


def read_parquet(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Raises `UnreadableError` where the file is damaged."""
    with open_seekable(path) as raw:
        first = 1
        try:
            with pyarrow.parquet.ParquetFile(raw, buffer_size=COLUMN_BUFFER_BYTES) as file:
                for batch in file.iter_batches(batch_size=rows_per_chunk):
                    yield table_rows(first, batch)
                    first += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise UnreadableError(
                f"Parquet cannot be read after row {first - 1}: {error}"
            ) from None


def read_arrow(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    """Raises `UnreadableError` where the file is damaged."""
    first = 1
    with _arrow_source(path) as source:
        try:
            for batch in _batches(source):
                for start in range(0, batch.num_rows, rows_per_chunk):
                    part = batch.slice(start, rows_per_chunk)
                    yield table_rows(first, part)
                    first += part.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise UnreadableError(f"Arrow cannot be read after row {first - 1}: {error}") from None


def _arrow_source(path: Path) -> Any:
    """Map a plain file into memory, where a batch of any size takes none until it is read."""
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
    for place in range(reader.num_record_batches):
        yield reader.get_batch(place)
