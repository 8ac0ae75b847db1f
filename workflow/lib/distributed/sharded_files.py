"""Sharded tensors on disk: a safetensors file per process, and an index of the pieces.

`index.json` is written last, with size and SHA-256 of every file and its own checksum. Pieces are
placed by offset (DTensor's chunk list), so any number of processes can read them. torch's
distributed checkpoint keeps a pickle (`.metadata`), which could run code, and has no checksums."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from workflow.lib.system.files import (
    file_sha256,
    is_passing,
    read_checked_json,
    sync,
    write_checked_json,
)

INDEX = "index.json"
FORMAT_VERSION = 1


class DamagedError(Exception):
    """A folder differs from its index; the text names the file."""


class WriteError(Exception):
    """A process could not write its part; raised on all processes with the same text."""


@dataclass(frozen=True)
class Piece:
    """One process's part of a tensor: `local` lies at `offset` of the whole `shape`."""

    local: torch.Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_written: bool  # False: another process writes the same values

    def staged(self) -> "Piece":
        """Return a copy on the CPU, which training cannot change."""
        copy = self.local.detach().to("cpu", copy=True).contiguous()
        return Piece(copy, self.offset, self.shape, self.is_written)


def piece_of(tensor: torch.Tensor, *, rank: int) -> Piece:
    """Return this process's part of a tensor; rank 0 writes undistributed ones."""
    if not isinstance(tensor, DTensor):
        whole = tensor.detach()
        return Piece(whole, (0,) * whole.dim(), tuple(whole.shape), is_written=rank == 0)
    (chunk,) = tensor.__create_chunk_list__()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this process is in the mesh"
    axes = zip(coordinate, tensor.placements, strict=True)
    first = all(index == 0 for index, placement in axes if placement.is_replicate())
    local = tensor.to_local().detach()
    return Piece(local, tuple(chunk.offsets), tuple(tensor.shape), is_written=first)


def write_sharded(
    folder: Path,
    pieces: Mapping[str, Piece],
    *,
    group: dist.ProcessGroup,
    facts: Mapping[str, Any],
    companions: Iterable[Path] = (),
) -> None:
    """Write every process's pieces and, on the group's first process, the index with `facts`; all
    fsynced. Collective. folder: exists. companions: files in it that rank 0 has written, to be
    covered by checksums. Raises `WriteError` on all processes if one of them fails."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = f"shard-{rank:05d}-of-{size:05d}.safetensors"
    # A failure is returned as a value: an exception here would leave the others waiting.
    part = _attempt(lambda: _write_part(folder / name, pieces, companions if rank == 0 else ()))
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, part, group=group)
    _raise_first(parts)
    done = [_attempt(lambda: _write_index(folder, parts, facts)) if rank == 0 else None]
    dist.broadcast_object_list(done, group=group, group_src=0)
    _raise_first(done)


def _attempt(action: Any) -> Any:
    """Return the action's result, or its error as a string."""
    try:
        return action()
    except (OSError, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"


def _raise_first(results: Iterable[Any]) -> None:
    for result in results:
        if isinstance(result, str):
            raise WriteError(result)


def _write_part(
    path: Path, pieces: Mapping[str, Piece], companions: Iterable[Path]
) -> dict[str, Any]:
    written = {n: piece for n, piece in pieces.items() if piece.is_written and piece.local.numel()}
    save_file({name: piece.local for name, piece in written.items()}, path)
    path.chmod(0o644)  # safetensors keeps other users out
    files = [path, *companions]
    for file in files:
        sync(file)
    return {
        "files": {f.name: {"bytes": f.stat().st_size, "sha256": file_sha256(f)} for f in files},
        "tensors": {name: _entry(piece, path.name) for name, piece in written.items()},
    }


def _entry(piece: Piece, file: str) -> dict[str, Any]:
    location = {"file": file, "offset": piece.offset, "shape": tuple(piece.local.shape)}
    dtype = str(piece.local.dtype).removeprefix("torch.")
    return {"shape": piece.shape, "dtype": dtype, "pieces": [location]}


def _write_index(folder: Path, parts: list[dict[str, Any]], facts: Mapping[str, Any]) -> None:
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, entry in part["tensors"].items():
            whole_entry = tensors.setdefault(name, entry | {"pieces": []})
            whole_entry["pieces"].extend(entry["pieces"])
    files = {name: facts for part in parts for name, facts in part["files"].items()}
    head = {"format_version": FORMAT_VERSION, "processes": len(parts), **facts}
    content = head | {"files": files, "tensors": dict(sorted(tensors.items()))}
    write_checked_json(folder / INDEX, content)
    sync(folder)


def read_index(folder: Path) -> dict[str, Any]:
    """Return the index of a folder; raises `DamagedError` if it is missing or unreadable."""
    try:
        index = read_checked_json(folder / INDEX)
        version = index["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if is_passing(error):
            raise
        raise DamagedError(f"{INDEX} cannot be read ({type(error).__name__}: {error})") from None
    if version != FORMAT_VERSION:
        raise DamagedError(f"{INDEX} has format_version {version!r} instead of {FORMAT_VERSION}")
    _check_names(index)
    return index


def _check_names(index: dict[str, Any]) -> None:
    """Raise `DamagedError` unless all files lie in the folder, with checksums for all pieces."""
    try:
        files = set(index["files"])
        used = {piece["file"] for entry in index["tensors"].values() for piece in entry["pieces"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{INDEX} cannot be read ({type(error).__name__}: {error})") from None
    strange = {name for name in files if Path(name).name != name} | (used - files)
    if strange:
        raise DamagedError(f"{INDEX} names a file that is not of this folder: {min(strange)!r}")


def check_files(folder: Path, index: dict[str, Any], *, share: slice = slice(None)) -> None:
    """Compare size and SHA-256 of (a share of) the files; raises `DamagedError` at a difference."""
    for name in sorted(index["files"])[share]:
        expected = index["files"][name]
        try:
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                raise DamagedError(f"{name} has {size} bytes instead of {expected['bytes']}")
            if file_sha256(folder / name) != expected["sha256"]:
                raise DamagedError(f"{name} does not have its SHA-256")
        except OSError as error:
            if is_passing(error):
                raise
            raise DamagedError(f"{name} cannot be read ({error.strerror})") from None


def read_into_(folder: Path, index: dict[str, Any], targets: Mapping[str, Piece]) -> None:
    """Fill the pieces' local tensors in place from any pieces in the folder. Raises `DamagedError`
    if the folder holds other tensors than `targets`, or does not cover one."""
    if index["tensors"].keys() != targets.keys():
        other = min(index["tensors"].keys() ^ targets.keys())
        raise DamagedError(f"it holds other tensors than this run ({other})")
    with ExitStack() as stack, torch.no_grad():
        opened: dict[str, Any] = {}
        for name, target in targets.items():
            filled = 0
            for file, source, destination in _overlaps(name, index["tensors"][name], target):
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(folder / file, framework="pt"))
                stored = opened[file]
                values = stored.get_slice(name)[source] if source else stored.get_tensor(name)
                target.local[destination].copy_(values)
                filled += values.numel()
            if filled != target.local.numel():
                raise DamagedError(f"{name} is not covered by its pieces")


def _overlaps(
    name: str, entry: dict[str, Any], target: Piece
) -> Iterator[tuple[str, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield file, region of its piece, and region of the target, for all overlaps."""
    stored = (tuple(entry["shape"]), entry["dtype"])
    expected = (target.shape, str(target.local.dtype).removeprefix("torch."))
    if stored != expected:
        raise DamagedError(f"{name} is {stored} instead of {expected}")
    for piece in entry["pieces"]:
        bounds = [
            (max(a, b), min(a + m, b + n), a, b)
            for a, m, b, n in zip(
                piece["offset"], piece["shape"], target.offset, target.local.shape, strict=True
            )
        ]
        if all(low < high for low, high, _, _ in bounds):
            source = tuple(slice(low - a, high - a) for low, high, a, _ in bounds)
            destination = tuple(slice(low - b, high - b) for low, high, _, b in bounds)
            yield piece["file"], source, destination


def read_whole(folder: Path, *, below: str = "") -> dict[str, torch.Tensor]:
    """Return every tensor whose name begins with `below`, by the rest of its name: whole, on the
    CPU, all files checked; raises `DamagedError`. Local."""
    index = read_index(folder)
    check_files(folder, index)
    chosen = {name: e for name, e in index["tensors"].items() if name.startswith(below)}
    tensors = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in chosen.items()
    }
    pieces = {name: piece_of(tensor, rank=0) for name, tensor in tensors.items()}
    read_into_(folder, index | {"tensors": chosen}, pieces)
    return {name.removeprefix(below): tensor for name, tensor in tensors.items()}
