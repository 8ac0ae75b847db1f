"""Types and compressions of data files, by their names; files as streams of unpacked bytes.

The unpacked size is bounded: a compressed file may be made to fill a disk or to take hours."""

import bz2
import io
import lzma
import shutil
import tempfile
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, Literal

from workflow.lib.settings.data import FileType
from workflow.lib.system.errors import setting_error

BUFFER_BYTES = 2**20
# Repetitive rows, such as lists of zeros, may shrink a hundredfold; gzip can shrink 1,032 times,
# the others more.
MAX_RATIO = 500
MIN_UNPACKED_BYTES = 2**30  # below this no file is suspected
Compression = Literal["gzip", "zstd", "bz2", "xz"]
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
COMPRESSIONS: dict[str, Compression] = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".bz2": "bz2",
    ".xz": "xz",
}
# By the standard library; pyarrow reads the others.
STANDARD: dict[Compression, type[bz2.BZ2File | lzma.LZMAFile]] = {
    "bz2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
}
DAMAGED = (EOFError, lzma.LZMAError)


class UnreadableError(ValueError):
    """A file that cannot be read further; the message says why."""


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading from its beginning, decompressed. Raises, also later, `OSError` if it
    is damaged, `UnreadableError` if its unpacked size is too large."""
    compression = compression_of(path)
    if compression is None:
        return path.open("rb", buffering=BUFFER_BYTES)
    if opened := STANDARD.get(compression):
        raw: Any = opened(path)
    else:
        import pyarrow  # here: Snakemake reads this module at each start, and no file

        raw = pyarrow.input_stream(str(path), compression=compression)
    bounded = _Unpacked(raw, packed_bytes=path.stat().st_size)
    return io.BufferedReader(bounded, buffer_size=BUFFER_BYTES)


class _Unpacked(io.RawIOBase):
    """The content of a compressed file, up to `MAX_RATIO` times its size."""

    def __init__(self, raw: Any, *, packed_bytes: int) -> None:
        self._raw = raw
        self._max_bytes = max(MIN_UNPACKED_BYTES, MAX_RATIO * packed_bytes)
        self._unpacked = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = int(self._raw.readinto(buffer))
        except DAMAGED as error:
            raise OSError(str(error)) from None
        self._unpacked += count
        if self._unpacked > self._max_bytes:
            raise UnreadableError(
                f"it unpacks to more than {MAX_RATIO} times its size "
                f"({self._max_bytes / 2**30:.1f} GiB), as files do that are made to "
                "fill a disk; if that is right, unpack it yourself"
            )
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def open_seekable(path: Path) -> IO[bytes]:
    """Open a file for reading anywhere; a compressed one in a temporary unpacked file."""
    if compression_of(path) is None:
        return path.open("rb")
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115  (the caller closes it)
    with open_bytes(path) as packed:
        shutil.copyfileobj(packed, unpacked, BUFFER_BYTES)
    unpacked.seek(0)
    return unpacked


def read_head(path: Path, *, length: int = 4096) -> bytes:
    """Return the first `length` unpacked bytes of a file."""
    with open_bytes(path) as file:
        return file.read(length)


def compression_of(path: PurePath) -> Compression | None:
    return COMPRESSIONS.get(path.suffix.lower())


def type_by_name(path: PurePath) -> FileType | None:
    """Return the type by the extension, without a compression's; None if it is none of
    `EXTENSIONS`."""
    inner = path.with_suffix("") if compression_of(path) else path
    return EXTENSIONS.get(inner.suffix.lower())


def file_type_of(path: PurePath, *, setting: str) -> FileType:
    """Return the type of a file by its name; raises `UserError`, naming `setting`, if it is
    unknown."""
    file_type = type_by_name(path)
    if file_type is None:
        extensions, compressions = ", ".join(EXTENSIONS), " or ".join(COMPRESSIONS)
        raise setting_error(
            setting,
            str(path),
            f"the extension is none of {extensions} (also with {compressions} behind it)",
            "Name the file for what it holds, or set data.file_type",
        )
    return file_type
