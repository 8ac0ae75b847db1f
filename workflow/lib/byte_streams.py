"""Data files as streams of bytes, whatever compression is around them; pyarrow brings both codecs."""

import io
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, BinaryIO

import pyarrow

from workflow.lib.file_types import compression_of

BUFFER_BYTES = 2**20


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading from its beginning, decompressed. Raises `OSError`, also later, if it is damaged."""
    compression = compression_of(path)
    if compression is None:
        return path.open("rb", buffering=BUFFER_BYTES)
    raw = pyarrow.input_stream(str(path), compression=compression)
    return io.BufferedReader(raw, buffer_size=BUFFER_BYTES)


def open_seekable(path: Path) -> IO[bytes]:
    """Open a file for reading at any place; a compressed one is unpacked into a temporary file, which goes when closed."""
    if compression_of(path) is None:
        return path.open("rb")
    with open_bytes(path) as packed, ExitStack() as on_error:
        unpacked = on_error.enter_context(tempfile.TemporaryFile())
        shutil.copyfileobj(packed, unpacked, BUFFER_BYTES)
        unpacked.seek(0)
        on_error.pop_all()
        return unpacked


def read_head(path: Path, *, length: int = 4096) -> bytes:
    """Return the first bytes, decompressed. Raises `OSError`."""
    with open_bytes(path) as file:
        return file.read(length)
