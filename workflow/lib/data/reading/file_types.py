"""What the bytes of a data file are, told by its name: the type, and the compression around it."""

from pathlib import PurePath
from typing import Literal

from workflow.lib.settings.data import FileType
from workflow.lib.system.errors import setting_error

Compression = Literal["gzip", "zstd"]

EXTENSIONS: dict[str, FileType] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}


def compression_of(path: PurePath) -> Compression | None:
    return COMPRESSIONS.get(path.suffix.lower())


def known_type(path: PurePath) -> FileType | None:
    inner = path.with_suffix("") if compression_of(path) else path
    return EXTENSIONS.get(inner.suffix.lower())


def file_type_of(path: PurePath, *, setting: str) -> FileType:
    """Return the type that a file's name tells; raises `UserError` if it tells none."""
    file_type = known_type(path)
    if file_type is None:
        known, outer = ", ".join(EXTENSIONS), " or ".join(COMPRESSIONS)
        raise setting_error(
            setting,
            str(path),
            f"the extension is none of {known} (also with {outer} behind it)",
            "Name the file for what it holds, or set data.file_type",
        )
    return file_type
