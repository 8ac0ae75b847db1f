"""Slices of the NF4 weights of all experts of a layer, decoded to 8 bits."""

from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import quantize_4bit

from workflow.lib.kernels.eight_bits.matmul import decoded, row_scales
from workflow.lib.kernels.eight_bits.rounding import FORMATS
from workflow.lib.kernels.launch import WARPS, launch
from workflow.lib.kernels.nf4.decode import NF4Data
from workflow.lib.kernels.op import Case, Op

DECODED_BLOCKS, DECODED_ROWS = 64, 128  # of a program
FLOAT8 = FORMATS["float8"]


class PackedStack(NamedTuple):
    """NF4 weights (experts, rows, width)."""

    data: NF4Data
    experts: int
    rows: int
    width: int

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        data = self.data
        return data.packed, *data.scale_parts, data.code, data.nested_code, data.offset

    @property
    def coding(self) -> dict[str, Any]:
        # As for `nf4.decode`: products and sums are not contracted.
        double = self.data.doubly_quantized
        return {"block_size": self.data.block_size, "double": double, "enable_fp_fusion": False}

    @property
    def by_expert(self) -> tuple[int, int]:
        """The shape with a row for each expert."""
        return self.experts, self.rows * self.width


def _rows_by_kernel(
    stack: PackedStack, scales: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    block, width = stack.data.block_size, stack.width
    out = torch.empty((stack.experts, stop - start, width), dtype=dtype, device=scales.device)
    num_blocks = out.numel() // block
    strides = (x * width // block for x in (start, stop - start, stack.rows))
    launch(
        "experts.decode_rows", (-(-num_blocks // DECODED_BLOCKS),), out, *stack.stored, scales,
        num_blocks, *strides, blocks=DECODED_BLOCKS, num_warps=WARPS // 2, **stack.coding,
    )  # fmt: skip
    return out


def _columns_by_kernel(
    stack: PackedStack, scales: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    block = stack.data.block_size
    out = torch.empty((stack.experts, stop - start, stack.rows), dtype=dtype, device=scales.device)
    grid = (-(-stack.rows // DECODED_ROWS), (stop - start) // block, stack.experts)
    launch(
        "experts.decode_columns", grid, out, *stack.stored, scales,
        stack.rows, stack.width // block, start // block,
        rows=DECODED_ROWS, num_warps=WARPS, **stack.coding,
    )  # fmt: skip
    return out


def _whole(stack: PackedStack, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    flat = decoded(stack.data, scales, stack.by_expert, FLOAT8._replace(dtype=dtype))
    return flat.view(stack.experts, stack.rows, stack.width)


def _rows_by_torch(
    stack: PackedStack, scales: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    return _whole(stack, scales, dtype)[:, start:stop]


def _columns_by_torch(
    stack: PackedStack, scales: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    return _whole(stack, scales, dtype)[..., start:stop].transpose(1, 2)


def _case(device: torch.device, dtype: torch.dtype) -> Case:
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(3 * 16, 128, generator=draw).to(device)
    made: Any = quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
    stack = PackedStack(NF4Data.of(*made), 3, 16, 128)
    return stack, row_scales(stack.data, stack.by_expert, FLOAT8), 0, 64, dtype


decode_rows = Op(
    "rows of experts in 8 bits",
    reference=_rows_by_torch,
    kernel=_rows_by_kernel,
    case=lambda *given: (*_case(*given)[:3], 8, given[1]),
    variant=lambda *args: (args[-1],),
)
"""Returns rows `start` to `stop` of all experts (experts, stop - start, width), divided by their
`scales` (experts,) fp32, in a type of 8 bits."""
decode_columns = Op(
    "columns of experts in 8 bits",
    reference=_columns_by_torch,
    kernel=_columns_by_kernel,
    case=_case,
    variant=lambda *args: (args[-1],),
)
"""Returns columns in the same way, transposed: (experts, stop - start, rows)."""
