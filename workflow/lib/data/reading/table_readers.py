"""Parquet and Arrow files as chunks, a batch at a time.

An Arrow file is an IPC file (Feather) or an IPC stream.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from workflow.lib.data.reading.chunks import Chunk
from workflow.lib.data.reading.compression import UnreadableError, open_seekable
from workflow.lib.data.reading.file_types import compression_of
from workflow.lib.data.reading.table_rows import table_rows
from workflow.lib.data.reading.text_readers import CHUNK_BYTES

ARROW_FILE_MARK = b"ARROW1"
# Of each column at a time; pyarrow reads a row group's whole columns otherwise.
COLUMN_BUFFER_BYTES = 2**20


def read_parquet(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
    with open_seekable(path) as raw:
        first = 1
        try:
            with pyarrow.parquet.ParquetFile(
                raw,
                buffer_size=COLUMN_BUFFER_BYTES,
                pre_buffer=False,
                arrow_extensions_enabled=True,
            ) as file:
                step = _rows_that_fit(
                    _stored_bytes(file.metadata), file.metadata.num_rows, rows_per_chunk
                )
                for batch in file.iter_batches(batch_size=step):
                    yield table_rows(first, batch)
                    first += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise UnreadableError(
                f"Parquet cannot be read after row {first - 1}: {error}"
            ) from None


def read_arrow(path: Path, *, rows_per_chunk: int) -> Iterator[Chunk]:
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


def _stored_bytes(metadata: Any) -> int:
    """Return the bytes of all row groups of a Parquet file, not compressed."""
    return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))


def _rows_that_fit(num_bytes: int, num_rows: int, rows_per_chunk: int) -> int:
    """Return how many rows of average size a chunk may hold."""
    return max(1, min(rows_per_chunk, CHUNK_BYTES * num_rows // max(1, num_bytes)))


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
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)
