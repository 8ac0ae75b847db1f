"""A checkpoint of which some weights are packed (`packed_formats`), read as if all were in 16 bits.

Packed names are not seen: a weight has the name, shape and type that it has unpacked. Only what is
asked for is decoded.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from workflow.lib.model.architecture.config_file import read_bounded
from workflow.lib.model.architecture.quantization_settings import said_of_quantization
from workflow.lib.model.published.loaded_files import loaded_tensors
from workflow.lib.model.published.packed_formats import MX_BLOCK, decode_fp8, decode_mxfp4
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.system.checksums import RecordedFile
from workflow.lib.system.errors import UserError

FP8_SCALE, MX_BLOCKS, MX_SCALES = "_scale_inv", "_blocks", "_scales"
# Of activations, which the workflow computes in 16 bits.
ACTIVATION_SCALES = (".activation_scale", ".input_scale")


class DecodedReader(CheckpointReader):
    """`CheckpointReader` that decodes FP8 and MXFP4.

    finite: raise `UserError` for a value read that is not a finite number.
    """

    def __init__(
        self, folder: Path, *, recorded: Iterable[RecordedFile] = (), finite: bool = False
    ) -> None:
        tensors = loaded_tensors(folder)
        shards = {name: tensor.file for name, tensor in tensors.items()}
        super().__init__(folder, shards=shards, recorded=recorded)
        self._finite = finite
        stored = self._shards.keys()
        self._fp8 = {
            name.removesuffix(FP8_SCALE)
            for name in stored
            if name.endswith(FP8_SCALE) and name.removesuffix(FP8_SCALE) in stored
        }
        self._mxfp4 = {
            name.removesuffix(MX_BLOCKS)
            for name in stored
            if name.endswith(MX_BLOCKS) and name.removesuffix(MX_BLOCKS) + MX_SCALES in stored
        }
        self._block_size = _block_size(folder) if self._fp8 else None
        hidden = {f"{name}{FP8_SCALE}" for name in self._fp8}
        hidden |= {f"{name}{suffix}" for name in self._mxfp4 for suffix in (MX_BLOCKS, MX_SCALES)}
        if self._fp8:
            hidden |= {name for name in stored if name.endswith(ACTIVATION_SCALES)}
        self._files_of = {n: file for n, file in self._shards.items() if n not in hidden}
        self._files_of |= {name: self._shards[f"{name}{MX_BLOCKS}"] for name in self._mxfp4}

    @property
    def packed(self) -> set[str]:
        """Names of the weights that are decoded."""
        return self._fp8 | self._mxfp4

    def __contains__(self, name: str) -> bool:
        return name in self._files_of

    def names(self) -> list[str]:
        """Return the names of all tensors, in order of shard and name."""
        return sorted(self._files_of, key=lambda name: (self._files_of[name], name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        if name not in self._mxfp4:
            return super().shape(name)
        experts, out_features, blocks, _ = super().shape(f"{name}{MX_BLOCKS}")
        return experts, blocks * MX_BLOCK, out_features

    def dtype(self, name: str) -> str:
        """Return safetensors' name of a tensor's type when it is read, without reading it."""
        return "BF16" if name in self.packed else super().dtype(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the CPU."""
        if name in self.packed:
            return self.rows(name, 0, self.shape(name)[0])
        return self._checked(name, super().tensor(name))

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows `start` to `stop` of dim 0; reads and decodes only these."""
        return self._checked(name, self._rows(name, start, stop), first_row=start)

    def _checked(self, name: str, tensor: torch.Tensor, *, first_row: int = 0) -> torch.Tensor:
        """Return a tensor, or rows of it, as it was read."""
        if not self._finite or not tensor.is_floating_point() or tensor.isfinite().all():
            return tensor
        wrong = (~tensor.isfinite()).nonzero()
        place = [int(x) for x in wrong[0]]
        value = float(tensor[tuple(place)])
        if place:
            place[0] += first_row
        raise UserError(
            f"{self.folder / self._files_of[name]}: {name}{place} is {value} ({len(wrong):,} of "
            f"{tensor.numel():,} values that were read with it are no finite numbers). "
            "Download or export the model again, or choose another model.source."
        )

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name in self._mxfp4:
            parts = (super(DecodedReader, self).rows(f"{name}{s}", start, stop)
                     for s in (MX_BLOCKS, MX_SCALES))  # fmt: skip
            return decode_mxfp4(*parts)
        weight = super().rows(name, start, stop)
        if name not in self._fp8:
            return weight
        scale = super().tensor(f"{name}{FP8_SCALE}")
        if weight.dim() == 3:  # a stack, of which each expert has scales of its own
            scale = scale[start : max(start, stop)] if scale.dim() == 3 else scale
            return decode_fp8(weight, scale, self._block_size)
        return decode_fp8(weight, scale, self._block_size, first_row=start)


def _block_size(folder: Path) -> tuple[int, int] | None:
    """Return rows and columns that share a scale, as config.json says; None for a whole tensor."""
    config: dict[str, Any] = read_bounded(folder / "config.json")
    size = (said_of_quantization(config) or {}).get("weight_block_size")
    return None if size is None else (int(size[0]), int(size[1]))
