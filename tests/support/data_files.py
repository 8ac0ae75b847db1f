"""Data files that tests write and read."""

from pathlib import Path

from workflow.lib.data.reading.chunks import BrokenRow, Row
from workflow.lib.data.reading.data_file import read_rows
from workflow.lib.settings.data import FileType


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, file_type: FileType | None = None) -> list[Row | BrokenRow]:
    return list(read_rows(path, setting="data.train", file_type=file_type))
