"""The weights of all experts of a layer as one frozen weight.

A stack (experts, out, in) is stored like a linear of `experts * out` rows, so loading, sharding and
offload treat it as one. A matmul decodes at most `DECODED_BYTES`: some rows, or columns, of all
experts (where an expert's tokens begin is known to the device alone). A stack that is kept decoded
has one slice."""

import math
from collections.abc import Iterator

import torch

from workflow.lib.kernels.eight_bits.matmul import FLOAT8
from workflow.lib.model.layers.frozen_linear import FrozenLinear
from workflow.lib.model.layers.weight_storage import WeightStorage
from workflow.lib.system.errors import UserError
from workflow.lib.system.units import MIB

# Of a stack, in the compute dtype, as long as a slice of it can be cut. The stacks of a layer are
# the largest weights of a model; but each slice reads all rows again: decoding and matmuls of an
# expert layer of gpt-oss-120b took 16.0 ms by slices of 256 MiB, 13.5 of 512, 12.3 of 1,024, and of
# GLM-4.5-Air's first stack 7.6, 6.9 and 6.3 (4,096 tokens, H100, November 2026).
DECODED_BYTES = 512 * MIB


TILE_COLUMNS = 256  # of a program of the grouped matmul (`kernels.experts.grouped_matmul`)


class FrozenStack(FrozenLinear):
    """Frozen weights (experts, out, in) as a linear; `fused_experts` makes their matmuls."""

    def __init__(self, spec: WeightStorage, *, compute_dtype: torch.dtype) -> None:
        """Raises `UserError` if an expert does not begin at a block of the quantization."""
        super().__init__(spec, bias=False, compute_dtype=compute_dtype)
        self.num_experts = spec.experts
        self.expert_rows = spec.shape[0] // spec.experts
        if self.expert_rows * self.in_features % spec.unit:
            raise UserError(
                f"quantize.block_size: {spec.unit} does not divide the "
                f"{self.expert_rows * self.in_features:,} weights of an expert "
                f"({self.expert_rows} x {self.in_features}), so a block would hold weights of two "
                "experts. Choose a smaller block_size that divides them."
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Never called: a token goes to some of the experts (`fused_experts`)."""
        raise NotImplementedError("which experts x goes to is not known here")

    def row_slices(self, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of rows of all experts that are decoded at a time."""
        if self.keeps(dtype):
            yield 0, self.expert_rows
            return
        yield from _slices(self.expert_rows, self._unit(self.in_features), self._most(dtype))

    def column_slices(self, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of columns decoded at a time: all, unless rows begin at blocks."""
        if self.keeps(dtype, transposed=dtype == FLOAT8):
            yield 0, self.in_features
            return
        whole = bool(self.in_features % self.spec.unit)
        unit = self.in_features if whole else self.spec.unit
        yield from _slices(self.in_features, unit, self._most(dtype))

    def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return rows `start` to `stop` of every expert (experts, stop - start, in)."""
        if self.keeps(dtype):
            return self._whole(dtype)[:, start:stop]
        width, size = self.in_features, self.expert_rows * self.in_features
        decoded = self._decode(start * width, (stop - start) * width, size, dtype)
        return decoded.view(self.num_experts, stop - start, width)

    def dequantize_columns(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return columns `start` to `stop` of every expert (experts, out, stop - start)."""
        if self.keeps(dtype):
            return self._whole(dtype)[..., start:stop]
        if stop - start == self.in_features:
            return self.dequantize_experts(0, self.num_experts, dtype)
        decoded = self._decode(start, stop - start, self.in_features, dtype)
        return decoded.view(self.num_experts, self.expert_rows, stop - start)

    def dequantize_experts(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of experts `start` to `stop` (stop - start, out, in)."""
        size = self.expert_rows * self.in_features
        decoded = self._decode(start * size, (stop - start) * size, self.num_experts * size, dtype)
        return decoded.view(stop - start, self.expert_rows, self.in_features)

    def _whole(self, dtype: torch.dtype) -> torch.Tensor:
        return self.dequantize(dtype).view(self.num_experts, self.expert_rows, self.in_features)

    def _unit(self, width: int) -> int:
        """Return the fewest rows of `width` weights that are whole units of the storage."""
        return self.spec.unit // math.gcd(self.spec.unit, width)

    def _most(self, dtype: torch.dtype) -> float:
        """Return the share of the stack that may be decoded at a time."""
        return DECODED_BYTES / max(self.spec.decoded_bytes(dtype), 1)

    def _decode(self, first: int, length: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `length` weights from `first`, `first` + `stride`, ..., of whole units."""
        return self.spec.decode_strides(self.stored(), (first, length, stride), dtype)


def _slices(size: int, unit: int, most: float) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) that cut `size` into slices of at most `most` of it, in whole units, and
    in whole tiles of the matmul if they are as wide as one: a part of a tile takes as long."""
    step = max(int(size * most) // unit, 1) * unit
    if step >= TILE_COLUMNS and TILE_COLUMNS % unit == 0:
        count = -(-size // (step - step % TILE_COLUMNS))
        step = -(-size // (count * TILE_COLUMNS)) * TILE_COLUMNS
    for start in range(0, size, step):
        yield start, min(start + step, size)
