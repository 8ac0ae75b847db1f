"""How a frozen weight is stored: in NF4 (QLoRA, arXiv 2305.14314), or in 16 bits.

A storage describes a weight once: its parts with their bytes, the weight that these encode, and the
bytes of a checkpoint that fill them. NF4: w = code[q] * absmax[block], absmax = code2[a] *
absmax2[block2] + offset. In 16 bits the weight is its own code, in the compute dtype.

Experts are stacked in rows: a stack (experts, out, in) is a weight of experts * out rows."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from bitsandbytes.utils import unpack_tensor_to_dict

from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.kernels.nf4.decode import (
    NESTED_BLOCK_SIZE,
    BlockStrides,
    NF4Data,
    decode,
    dequantize_nf4,
)
from workflow.lib.system.device_types import GPUS
from workflow.lib.system.errors import UserError

STATE_SUFFIX = "weight.quant_state.bitsandbytes__nf4"
# Part of a weight in NF4 -> suffix of its tensor in Transformers' checkpoint layout.
CHECKPOINT_SUFFIX = {
    "weight": "weight",
    "absmax": "weight.absmax",
    "nested_absmax": "weight.nested_absmax",
}
CODE_SUFFIX = {"quant_map": "weight.quant_map", "nested_quant_map": "weight.nested_quant_map"}
Parts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class NF4Spec:
    """A packed weight: shape (out, in), of experts the rows of all; weights per scale, double
    quantization, experts of the stack (1 for a linear)."""

    shape: tuple[int, int]
    block_size: int
    double_quant: bool
    offset: float
    experts: int = 1

    @property
    def unit(self) -> int:
        """Weights that are decoded together: those of a block."""
        return self.block_size

    @property
    def num_blocks(self) -> int:
        """Scales of the weight: one per started block."""
        return math.ceil(math.prod(self.shape) / self.block_size)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each stored part, by parameter name."""
        packed = {"weight": math.ceil(math.prod(self.shape) / 2)}
        if not self.double_quant:
            return packed | {"absmax": 4 * self.num_blocks}
        nested = math.ceil(self.num_blocks / NESTED_BLOCK_SIZE)
        return packed | {"absmax": self.num_blocks, "nested_absmax": 4 * nested}

    @property
    def tables(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the fp32 buffers that decoding needs: the code tables and the offset."""
        return {"quant_map": (16,), "nested_quant_map": (256,), "nested_offset": ()}

    def part_range(self, name: str, *, start: int, stop: int) -> tuple[int, int]:
        """Return a part's bytes for weights `start` to `stop`; `start` begins a nested block."""
        if name == "weight":
            return start // 2, math.ceil(stop / 2)
        nested = name == "nested_absmax"
        weights = self.block_size * (NESTED_BLOCK_SIZE if nested else 1)  # that share an element
        size = 1 if self.double_quant and not nested else 4
        return size * (start // weights), size * math.ceil(stop / weights)

    def stored(self, parts: Parts, tables: Parts) -> NF4Data:
        """Return the weight of its parts, whole tensors in any dtype, without decoding and without
        byte views, which cost the host time."""
        return NF4Data(
            parts["weight"],
            parts["absmax"],
            parts.get("nested_absmax"),
            code=tables["quant_map"],
            nested_code=tables["nested_quant_map"],
            offset=tables["nested_offset"],
            block_size=self.block_size,
        )

    def decode(self, stored: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight (out, in) in `dtype`."""
        device = stored.packed.device
        if device.type not in GPUS:  # bitsandbytes makes the tensor itself there
            return decode(stored, shape=self.shape, dtype=dtype)
        return dequantize_nf4(torch.empty(self.shape, dtype=dtype, device=device), stored)

    def decode_strides(
        self, stored: Any, strides: tuple[int, int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return `length` weights from `first`, `first` + `stride`, and so on, in whole blocks:
        (count, length)."""
        first, length, stride = strides
        count = len(range(first, math.prod(self.shape), stride))
        out = torch.empty(count * length, dtype=dtype, device=stored.packed.device)
        blocks = BlockStrides(*(weights // self.block_size for weights in strides))
        return dequantize_nf4(out, stored, blocks).view(count, length)

    def decoded_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that decoding the weight to `dtype` allocates."""
        return math.prod(self.shape) * dtype.itemsize

    def read_bytes(
        self, part: str, path: str, reader: CheckpointReader, *, start: int, stop: int
    ) -> torch.Tensor:
        """Return bytes `start` to `stop` of a part of the weight at `path`, uint8 on the CPU: of a
        tensor that the checkpoint has as it is."""
        key, total = f"{path}.{CHECKPOINT_SUFFIX[part]}", self.sizes[part]
        # 1 byte for uint8 parts, 4 for fp32 scales; all are cut at multiples of 4
        element = total // reader.shape(key)[0]
        rows = reader.rows(key, min(start, total) // element, min(stop, total) // element)
        return rows.reshape(-1).view(torch.uint8)

    def read_tables_(self, tables: Parts, path: str, reader: CheckpointReader) -> None:
        """Fill the buffers, code tables and offset, from a checkpoint."""
        for name, suffix in CODE_SUFFIX.items():
            if f"{path}.{suffix}" in reader:
                tables[name].copy_(reader.tensor(f"{path}.{suffix}"))
        tables["nested_offset"].fill_(self.offset)

    def read_rows(
        self, tables: Parts, path: str, reader: CheckpointReader, *, start: int, stop: int
    ) -> torch.Tensor:
        """Return rows `start` to `stop` in fp32, reading only these; decoding begins at a nested
        block."""
        width = self.shape[1]
        unit = self.block_size * NESTED_BLOCK_SIZE  # scales and nested scales restart here
        first = start * width // unit * unit
        last = min(-(-stop * width // unit) * unit, math.prod(self.shape))
        parts = {}
        for name in self.sizes:
            begin, end = self.part_range(name, start=first, stop=last)
            data = self.read_bytes(name, path, reader, start=begin, stop=end)
            parts[name] = data.to(tables["quant_map"].device)
        if self.double_quant:
            parts["nested_absmax"] = parts["nested_absmax"].view(torch.float32)
        stored = self.stored(parts, tables)
        weights = decode(stored, shape=(last - first,), dtype=torch.float32).view(-1)
        return weights[start * width - first : stop * width - first].view(stop - start, width)


@dataclasses.dataclass(frozen=True)
class PlainSpec:
    """A weight in 16 bits: shape (out_features, in_features), and the compute dtype, which holds it
    in memory. transposed: the checkpoint has (experts, in, out)."""

    shape: tuple[int, int]
    dtype: torch.dtype
    experts: int = 1
    transposed: bool = False

    @property
    def unit(self) -> int:
        """1: a weight is decoded alone."""
        return 1

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the weight."""
        return {"weight": math.prod(self.shape) * self.dtype.itemsize}

    @property
    def tables(self) -> dict[str, tuple[int, ...]]:
        """None."""
        return {}

    def stored(self, parts: Parts, tables: Parts) -> torch.Tensor:
        """Return a view of the bytes as (out, in)."""
        flat: torch.Tensor = parts["weight"].view(self.dtype)
        return flat.as_strided(self.shape, (self.shape[1], 1))  # perhaps without padding

    def decode(self, stored: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight itself, in its own dtype."""
        weight: torch.Tensor = stored
        return weight.to(dtype)

    def decode_strides(
        self, stored: Any, strides: tuple[int, int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a view of the weight, in its own dtype."""
        first, length, stride = strides
        count = len(range(first, math.prod(self.shape), stride))
        start = stored.storage_offset() + first
        weight: torch.Tensor = stored.as_strided((count, length), (stride, 1), start)
        return weight.to(dtype)

    def decoded_bytes(self, dtype: torch.dtype) -> int:
        """None in its own dtype."""
        return 0 if dtype == self.dtype else math.prod(self.shape) * dtype.itemsize

    def read_bytes(
        self, part: str, path: str, reader: CheckpointReader, *, start: int, stop: int
    ) -> torch.Tensor:
        """Return bytes of the weight in the compute dtype. Whole rows are read, or experts."""
        size, stop = self.dtype.itemsize, min(stop, self.sizes[part])
        if start >= stop:
            return torch.empty(0, dtype=torch.uint8)
        key, row_bytes = f"{path}.weight", self.shape[1] * size
        if self.experts > 1:
            key, row_bytes = path, math.prod(self.shape) // self.experts * size
        self._check(reader, key)
        first = start // row_bytes
        rows = reader.rows(key, first, -(-stop // row_bytes))
        rows = (rows.mT if self.transposed else rows).to(self.dtype).contiguous()
        stored = rows.view(-1).view(torch.uint8)
        return stored[start - first * row_bytes : stop - first * row_bytes]

    def _check(self, reader: CheckpointReader, key: str) -> None:
        """Raise `UserError` for a weight of another shape."""
        out_features, in_features = self.shape
        sizes = (out_features // self.experts, in_features)
        expected = (self.experts, *(sizes[::-1] if self.transposed else sizes))
        if reader.shape(key) != (expected if self.experts > 1 else sizes):
            raise UserError(
                f"the base has {key} of shape {reader.shape(key)}, the model of {sizes}: it "
                "belongs to another model. Delete its folder below results/base: it is made again."
            )

    def read_tables_(self, tables: Parts, path: str, reader: CheckpointReader) -> None:
        """Do nothing: there are none."""

    def read_rows(
        self, tables: Parts, path: str, reader: CheckpointReader, *, start: int, stop: int
    ) -> torch.Tensor:
        """Return rows of the weight."""
        row_bytes = self.shape[1] * self.dtype.itemsize
        span = {"start": start * row_bytes, "stop": stop * row_bytes}
        stored = self.read_bytes("weight", path, reader, **span)
        return stored.view(self.dtype).view(stop - start, self.shape[1]).float()


WeightStorage = NF4Spec | PlainSpec
"""The storage of a weight on one device, as it is used."""


def read_specs(reader: CheckpointReader) -> dict[str, NF4Spec]:
    """Return the spec of every quantized weight of a checkpoint, by module path."""
    paths = [n.removesuffix(f".{STATE_SUFFIX}") for n in reader.names() if n.endswith(STATE_SUFFIX)]
    return {path: _read_spec(reader, path) for path in paths}


def _read_spec(reader: CheckpointReader, path: str) -> NF4Spec:
    state: dict[str, Any] = unpack_tensor_to_dict(reader.tensor(f"{path}.{STATE_SUFFIX}"))
    *experts, out_features, in_features = state["shape"]  # of a stack three numbers
    num_experts = math.prod(experts)
    return NF4Spec(
        shape=(num_experts * out_features, in_features),
        block_size=state["blocksize"],
        double_quant="nested_offset" in state,
        offset=state.get("nested_offset", 0.0),
        experts=num_experts,
    )
