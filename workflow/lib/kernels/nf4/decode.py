"""Decoding of NF4 weights (QLoRA, arXiv 2305.14314): w = code[q] * absmax[block], with double
quantization absmax = nested_code[a] * nested_absmax[nested block] + offset."""

import copy
import math
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit

from workflow.lib.kernels.kernel_launch import WARPS, launch
from workflow.lib.kernels.op import Case, Op, drawn

# bitsandbytes' fixed block of the second quantization (functional.quantize_4bit)
NESTED_BLOCK_SIZE = 256
PROGRAM_WEIGHTS = 4096  # that one program decodes; with two warps 3.2 of an H200's 4.8 TB/s
REFERENCE_WEIGHTS = 2**22  # decoded at a time where strides select some
CASE_WEIGHTS = (96, 1024)  # more than one nested block


class NF4Data(NamedTuple):
    """An NF4 weight as it is stored, all on one device."""

    packed: torch.Tensor  # Bytes, two weights each, in a tensor of any type
    absmax: torch.Tensor
    """Bytes in a tensor of any dtype, one a block; or fp32 if `nested_absmax` is None."""
    nested_absmax: torch.Tensor | None  # fp32, one for 256 blocks
    code: torch.Tensor  # (16,) fp32
    nested_code: torch.Tensor  # (256,) fp32; not read if `nested_absmax` is None, nor is `offset`
    offset: torch.Tensor  # () fp32
    block_size: int

    @classmethod
    def of(cls, packed: torch.Tensor, state: QuantState) -> "NF4Data":
        """Return the result of bitsandbytes' `quantize_4bit`."""
        nested: Any = state.state2
        if nested is None:
            absmax: Any = state.absmax
            return cls(packed, absmax, None, state.code, state.code, state.code, state.blocksize)
        return cls(
            packed, state.absmax, nested.absmax, state.code, nested.code, state.offset,
            state.blocksize,
        )  # fmt: skip

    @property
    def doubly_quantized(self) -> bool:
        return self.nested_absmax is not None

    @property
    def scale_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors of the scales for kernels; they read the second only with double quantization."""
        nested = self.nested_absmax
        return self.absmax, self.absmax if nested is None else nested


class BlockStrides(NamedTuple):
    """Blocks of a weight: `length` from each of `first`, `first` + `stride`, and so on."""

    first: int
    length: int
    stride: int


def _by_kernel(
    out: torch.Tensor, data: NF4Data, strides: BlockStrides | None = None
) -> torch.Tensor:
    """Products and sums in fp32, none contracted, as in bitsandbytes' `dequantize_4bit`."""
    blocks = PROGRAM_WEIGHTS // data.block_size
    # With fusion code * absmax + offset would be rounded once; bitsandbytes rounds twice.
    launch(
        "elementwise.dequantize_nf4", (-(-out.numel() // (blocks * data.block_size)),), out,
        data.packed, *data.scale_parts, data.code, data.nested_code, data.offset,
        out.numel(), *(strides or (0, 0, 0)), in_runs=strides is not None,
        block_size=data.block_size, double_quant=data.doubly_quantized, num_blocks=blocks,
        num_warps=WARPS // 2, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _by_bitsandbytes(
    out: torch.Tensor, data: NF4Data, strides: BlockStrides | None = None
) -> torch.Tensor:
    if strides is None:
        return decode(data, shape=out.shape, dtype=out.dtype)
    first, length, stride = (blocks * data.block_size for blocks in strides)
    count, at_once = out.numel() // length, max(1, REFERENCE_WEIGHTS // stride)
    parts = []
    for i in range(0, count, at_once):
        num_pieces = min(at_once, count - i)
        start = first + i * stride
        whole = _range(data, start, start + (num_pieces - 1) * stride + length, out.dtype)
        parts.append(whole.as_strided((num_pieces, length), (stride, 1)).flatten())
    return torch.cat(parts).view(out.shape)


def _range(data: NF4Data, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Return weights `start` to `stop`, whole blocks. Decoding begins at a nested block, as
    bitsandbytes counts these from the first weight."""
    size = data.block_size
    first = start - start % (size * NESTED_BLOCK_SIZE)
    nested = data.nested_absmax
    part = data._replace(
        packed=_flat_bytes(data.packed)[first // 2 :],
        absmax=_absmax(data)[first // size :],
        nested_absmax=None if nested is None else nested[first // size // NESTED_BLOCK_SIZE :],
    )
    blocks = ((stop - first) // size, size)
    return decode(part, shape=blocks, dtype=dtype).view(-1)[start - first :]


def _flat_bytes(stored: torch.Tensor) -> torch.Tensor:
    return stored.detach().flatten().view(torch.uint8)


def _absmax(data: NF4Data) -> torch.Tensor:
    """Return an element for each block."""
    if data.nested_absmax is None:
        return data.absmax.detach().flatten().view(torch.float32)
    return _flat_bytes(data.absmax)


def decode(data: NF4Data, *, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the weights that `data` encodes, in `shape`, by bitsandbytes."""
    num_weights = math.prod(shape)
    num_blocks = math.ceil(num_weights / data.block_size)
    state: dict[str, Any] = {
        "shape": torch.Size(shape),
        "code": data.code,
        "blocksize": data.block_size,
        "quant_type": "nf4",
        "dtype": dtype,
    }
    if data.nested_absmax is None:
        state |= {"absmax": _absmax(data)[:num_blocks]}
    else:
        nested = QuantState(
            absmax=data.nested_absmax.detach()[: math.ceil(num_blocks / NESTED_BLOCK_SIZE)],
            code=data.nested_code,
            blocksize=NESTED_BLOCK_SIZE,
            dtype=torch.float32,
        )
        absmax = _absmax(data)[:num_blocks]
        state |= {"absmax": absmax, "state2": nested, "offset": data.offset}
    packed = _flat_bytes(data.packed)[: math.ceil(num_weights / 2)]
    return decoded(packed.unsqueeze(1), QuantState(**state))


def decoded(packed: torch.Tensor, state: QuantState) -> torch.Tensor:
    """Return the weights, of `state.shape` in `state.dtype`, that `packed` (n, 1) encodes.
    bitsandbytes 0.50 starts a block at every row on CPUs with AVX-512, where quantization does not:
    rows that are no whole blocks are decoded as rows of one block each, or as one long row."""
    shape, size = state.shape, state.blocksize
    if shape[-1] % size == 0:
        return dequantize_4bit(packed, state)
    count = math.prod(shape)
    rows = (1, count) if count % size else (count // size, size)
    flat = copy.copy(state)
    flat.shape = torch.Size(rows)
    return dequantize_4bit(packed, flat).view(shape)


def _case(device: torch.device, dtype: torch.dtype) -> Case:
    (weights,) = drawn(device, torch.bfloat16, CASE_WEIGHTS)
    made: Any = quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
    return torch.empty(CASE_WEIGHTS, dtype=dtype, device=device), NF4Data.of(*made)


dequantize_nf4 = Op(
    "the decoding of NF4", reference=_by_bitsandbytes, kernel=_by_kernel, case=_case, exact=True
)
"""Fills `out` with the weights of `data`, or some strides of their blocks, in its shape and dtype,
and returns it: the values of bitsandbytes, bit by bit."""
