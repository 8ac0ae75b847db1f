"""Data files that tests write and read."""

import bz2
import lzma
from pathlib import Path
from typing import Any

import pyarrow

from workflow.lib.data.reading.data_file import read_rows
from workflow.lib.data.reading.row_chunks import BrokenRow, Row
from workflow.lib.settings.data import FileType


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def compressed(path: Path, codec: str) -> Any:
    """A file that packs what is written to it."""
    if codec in ("bz2", "xz"):
        return bz2.open(path, "wb") if codec == "bz2" else lzma.open(path, "wb")
    return pyarrow.CompressedOutputStream(str(path), codec)


def read(path: Path, file_type: FileType | None = None) -> list[Row | BrokenRow]:
    return list(read_rows(path, setting="data.train", file_type=file_type))
