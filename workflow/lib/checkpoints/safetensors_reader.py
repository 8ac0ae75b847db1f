"""Reading safetensors checkpoints tensor by tensor, or slice by slice, by memory map.

Layout: one `model.safetensors`, or shards with `model.safetensors.index.json`."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from workflow.lib.checkpoints.files.model_files import named_weights
from workflow.lib.checkpoints.files.safetensors_headers import INDEX, SINGLE, read_index
from workflow.lib.system.checksums import HashedAhead, RecordedFile, refuse_damaged
from workflow.lib.system.errors import UserError

ROWS = 4096  # of two tables, compared at a time
QUANTIZATION = "quantization.json"  # in a base from quantize_base


def shard_of_tensor(folder: Path, *, single: str = SINGLE) -> dict[str, str]:
    """Return the file of each tensor of a folder: `single` before an index, as in Transformers.
    Raises `UserError` without safetensors, or for a broken index."""
    if (folder / single).is_file():
        with open_whole(folder / single) as file:
            return dict.fromkeys(file.keys(), single)
    if (folder / INDEX).is_file():
        return read_index(folder / INDEX)
    raise UserError(
        f"{folder} has neither {single} nor {INDEX}. Give a folder with a safetensors checkpoint "
        "(model.source); other formats can be converted with save_pretrained of Transformers."
    )


def check_whole(folder: Path, *, single: str = SINGLE) -> None:
    """Raise `UserError` if a file is missing, or shorter or longer than its header says."""
    for path in sorted(folder.glob("*.safetensors")):
        open_whole(path, made_here=True)
    named = named_weights(folder)  # which may be an index of its own
    if named is None or named.endswith(".safetensors"):
        shard_of_tensor(folder, single=named or single)


def open_whole(path: Path, *, made_here: bool = False) -> Any:
    """Return an open safetensors file; raises `UserError` if its length differs from its header.
    made_here: a stage wrote it, and a folder with `quantization.json`."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        made_here = made_here or (path.parent / QUANTIZATION).is_file()
        change = (
            f"Delete the folder {path.parent}; it is made again"
            if made_here
            else "Download it again"
        )
        raise UserError(f"{path} is not a whole safetensors file ({error}). {change}.") from None


class CheckpointReader:
    """Random access to a safetensors checkpoint's tensors; a context manager with open files.
    shards: the file of each tensor, if known. recorded: files that are hashed when opened; raises
    `UserError` if damaged. hashed: the others are hashed then too (their bytes are cached for the
    tensors that follow)."""

    def __init__(
        self,
        folder: Path,
        *,
        single: str = SINGLE,
        shards: Mapping[str, str] | None = None,
        recorded: Iterable[RecordedFile] = (),
        hashed: bool = False,
    ) -> None:
        self.folder = folder
        self._hashed = hashed
        self._recorded = {file.name: file for file in recorded}
        self._shards = dict(shards or shard_of_tensor(folder, single=single))
        self._hashes = HashedAhead(folder / shard for shard in self._shard_names())
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._hashes.end()

    def _shard_names(self) -> list[str]:
        return sorted({*self._shards.values()})

    def sha256(self) -> dict[str, str]:
        """Return the SHA-256 of each file of tensors; those that were not hashed yet are now."""
        recorded = {name: file.sha256 for name, file in self._recorded.items()}
        return {
            shard: recorded.get(shard) or self._hashes.sha256(self.folder / shard)
            for shard in self._shard_names()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def names(self) -> list[str]:
        """Return the names of all tensors, in order of shard and name."""
        return sorted(self._shards, key=lambda name: (self._shards[name], name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return safetensors' name of a tensor's type (`BF16`, `U8`, ...) without reading it."""
        return str(self._file(name).get_slice(name).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of dim 0 (empty if `start >= stop`), reading only these."""
        tensor: torch.Tensor = self._file(name).get_slice(name)[start : max(start, stop)]
        return tensor

    def equals(self, name: str, other: "CheckpointReader", other_name: str) -> bool:
        """Tell whether two tensors have one shape and the same values, some rows at a time."""
        shape = self.shape(name)
        if not shape or shape != other.shape(other_name):
            return False
        pairs = (
            (self.rows(name, row, row + ROWS), other.rows(other_name, row, row + ROWS))
            for row in range(0, shape[0], ROWS)
        )
        return all(torch.equal(own.float(), others.float()) for own, others in pairs)

    def experts(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the parts `start` to `stop` of a tensor along dim 0, reading one at a time."""
        for number in range(self.shape(name)[0])[start:stop]:
            yield self.rows(name, number, number + 1)[0]

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield stored name and tensor of all that `tensor` reads, given a new value of it."""
        yield name, tensor

    def nf4_parts(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return the stored parts of a weight that is decoded from NF4; None for another."""
        return None

    def _file(self, name: str) -> Any:
        if name not in self._shards:
            raise UserError(
                f"{self.folder} has no tensor {name!r}: it is not a checkpoint of this model. "
                "Check model.source, or delete the folder to have it made again."
            )
        shard = self._shards[name]
        if shard not in self._files:
            self._files[shard] = self._open_whole(shard)
        return self._files[shard]

    def _open_whole(self, shard: str) -> Any:
        """Open a shard after a check that it matches its record and holds the index's tensors."""
        if (file := self._recorded.get(shard)) is not None:
            refuse_damaged([file], [file.finding(self._hashes.sha256)])
        elif self._hashed:
            self._hashes.sha256(self.folder / shard)
        opened = open_whole(self.folder / shard)
        promised = {name for name, holder in self._shards.items() if holder == shard}
        absent = promised.difference(opened.keys())
        if absent:
            raise UserError(
                f"{self.folder / shard} lacks {min(absent)!r}, which {INDEX} promises there: "
                "the files do not belong together. Download them again."
            )
        return opened
