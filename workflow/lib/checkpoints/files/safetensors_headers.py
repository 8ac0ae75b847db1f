"""Names, types and shapes of a safetensors checkpoint, from the file headers alone, without torch.

A file is 8 bytes of header length (little-endian), JSON `{name: {dtype, shape, data_offsets}}`,
then the data (https://github.com/huggingface/safetensors#format). The file's size is checked
against the header, so a truncated download is found here."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.lib.system.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit (safetensors, `MAX_HEADER_SIZE`)
MAX_DIMS = 8  # of a tensor; multiplying millions of dimensions takes hours
ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}  # types that can be quantized to NF4
TAIL_BYTES = 4096  # a page, which file systems write at once
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: dtype as safetensors names it (`BF16`, ...), shape, and its file."""

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def read_headers(files: Iterable[Path]) -> dict[str, TensorInfo]:
    """Return every tensor of safetensors files by name; a later file wins. Raises `UserError` if a
    file is no safetensors file, or shorter than its header says."""
    return {name: tensor for path in files for name, tensor in _read_file(path).items()}


def zeros_at_end(path: Path) -> list[str]:
    """Return the tensors, whole or cut, in at least `TAIL_BYTES` zeros at the end of a file: a copy
    that broke off after its size was set leaves such."""
    header, data_bytes = read_header(path)
    left = path.stat().st_size
    begin = left - data_bytes
    with path.open("rb") as file:
        while left > begin:
            start = max(begin, left - TAIL_BYTES)
            file.seek(start)
            if used := file.read(left - start).rstrip(b"\0"):
                left = start + len(used)
                break
            left = start
    if path.stat().st_size - left < TAIL_BYTES:
        return []
    ends = {n: x["data_offsets"][1] for n, x in header.items() if n != "__metadata__"}
    return [
        name
        for name, end in ends.items()
        if begin + end > left and math.prod(header[name]["shape"])
    ]


def is_beside(folder: Path, name: str) -> bool:
    """Tell whether the folder has this file: an index may name any path."""
    try:
        return Path(name).name == name and (folder / name).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor of an index; raises `UserError` for files elsewhere."""
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise ValueError(f"it is larger than {MAX_HEADER_BYTES // 10**6} MB")
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name) for name in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is no index of a checkpoint ({error!r}). Download it again."
        ) from None
    missing = sorted(name for name in files if not is_beside(path.parent, name))
    if missing:
        raise UserError(
            f"{path} names {len(missing)} of {len(files)} files that are not beside it: "
            f"{', '.join(missing[:3])}. Complete the download."
        )
    return {str(name): str(file) for name, file in weight_map.items()}


def _read_file(path: Path) -> dict[str, TensorInfo]:
    header, data_bytes = read_header(path)
    try:
        return {
            name: _tensor(entry, file=path.name, data_bytes=data_bytes)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, ValueError, OverflowError, AssertionError) as error:
        raise UserError(
            f"{path} is not a whole safetensors file: {error}. Download it again."
        ) from None


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the parsed header and how many bytes of data follow it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise UserError(
                f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` there."
            )
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _not_safetensors(path)
        file.seek(8)
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise _not_safetensors(path) from None
    if not isinstance(header, dict):
        raise _not_safetensors(path)
    return header, size - 8 - length


def _not_safetensors(path: Path) -> UserError:
    return UserError(
        f"{path} is not a safetensors file, whatever its name says, or it is cut short in its "
        "header. Download it again."
    )


def _tensor(entry: dict[str, Any], *, file: str, data_bytes: int) -> TensorInfo:
    if len(entry["shape"]) > MAX_DIMS:
        raise ValueError(f"a tensor of {len(entry['shape'])} dimensions, at most {MAX_DIMS} are")
    info = TensorInfo(dtype=entry["dtype"], shape=tuple(map(int, entry["shape"])), file=file)
    begin, end = entry["data_offsets"]
    if info.dtype not in ELEMENT_BYTES:
        raise ValueError(f"unknown type {info.dtype}")
    if end > data_bytes:
        raise ValueError(f"its header promises {end} bytes of data, the file has {data_bytes}")
    if not 0 <= begin <= end or end - begin != info.num_bytes:
        raise ValueError(f"a tensor of shape {info.shape} {info.dtype} in {end - begin} bytes")
    return info
