"""GPU kernels of matmuls in float8: NF4 and activations to float8, and back.

`matmul` says what they compute, and computes the same on a CPU. The sizes of programs are the
fastest of those tried on an H200, for weights of 28,672 x 8,192 and 4,096 x 14,336.
"""

from typing import Any

import torch

from workflow.lib.kernels.launch import WARPS, launch, power_of_two
from workflow.lib.kernels.nf4.decode import NF4Data

# Of a row that a program has at a time; up to WHOLE_ROW elements it has the row in registers.
ROW_ELEMENTS, ROW_WARPS, WHOLE_ROW = 2048, 8, 32768
THREAD_ELEMENTS = 32  # of such a row
BLOCKS_ELEMENTS = 4096  # the same, of a row in blocks
DECODED_BLOCKS = 64  # of a program
TRANSPOSED_ROWS = 128  # of a program


def row_scales(data: NF4Data, *, shape: tuple[int, int], largest: float) -> torch.Tensor:
    """Return the scale (out,) fp32 of each row of an NF4 weight (out, in)."""
    num_rows, width = shape
    scales = torch.empty(num_rows, dtype=torch.float32, device=data.code.device)
    row_blocks = width // data.block_size
    launch(
        "eight_bits.row_scales", (num_rows,), scales, *data.scale_parts, data.nested_code,
        data.offset, row_blocks, most=largest, double=data.doubly_quantized,
        size=min(512, power_of_two(row_blocks)), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return scales


def decode(
    data: NF4Data,
    scales: torch.Tensor,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
    transposed: bool,
) -> torch.Tensor:
    """Return an NF4 weight divided by its rows' scales, in 8 bits: (out, in), or (in, out)."""
    num_rows, width = shape
    row_blocks = width // data.block_size
    out = torch.empty(shape[::-1] if transposed else shape, dtype=dtype, device=scales.device)
    given = (data.packed, *data.scale_parts, data.code, data.nested_code, data.offset, scales)
    options = {
        "block_size": data.block_size,
        "double": data.doubly_quantized,
        "enable_fp_fusion": False,
    }
    if transposed:
        launch(
            "eight_bits.decode_transposed", (-(-num_rows // TRANSPOSED_ROWS), row_blocks), out,
            *given, num_rows, row_blocks, rows=TRANSPOSED_ROWS, num_warps=WARPS, **options,
        )  # fmt: skip
    else:
        launch(
            "eight_bits.decode_eight_bits", (-(-num_rows * row_blocks // DECODED_BLOCKS),), out,
            *given, num_rows, row_blocks, blocks=DECODED_BLOCKS, num_warps=WARPS // 2, **options,
        )  # fmt: skip
    return out


def round_rows(
    rows: torch.Tensor,
    factors: torch.Tensor | None,
    *,
    largest: float,
    block: int | None,
    into: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write rows (T, width), times `factors` (width,) fp32 of their columns, in 8 bits, and their
    scales (T, blocks) fp32: one for each `block` columns, or for a row.

    into: values and scales.
    """
    rows = rows.contiguous()
    num_rows, width = rows.shape
    out, scales = into
    given = (scales, rows, rows if factors is None else factors, width)
    options: dict[str, Any] = {"most": largest, "folds": factors is not None}
    if block is None:
        launch("eight_bits.round_rows", (num_rows,), out, *given, **row_program(width), **options)
    else:
        num_blocks = scales.shape[1]
        blocks = min(BLOCKS_ELEMENTS // block, power_of_two(num_blocks))
        launch(
            "eight_bits.round_blocks", (num_rows, -(-num_blocks // blocks)), out, *given,
            num_blocks, block_size=block, blocks=blocks, num_warps=WARPS, **options,
        )  # fmt: skip


def row_program(width: int) -> dict[str, Any]:
    """Return how a program of one row has its elements."""
    size = power_of_two(width)
    if size > WHOLE_ROW:
        return {"whole": False, "size": ROW_ELEMENTS, "num_warps": ROW_WARPS}
    return {
        "whole": True,
        "size": size,
        "num_warps": min(32, max(4, size // 32 // THREAD_ELEMENTS)),
    }


def restore_rows(
    values: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype, block: int
) -> torch.Tensor:
    """Return rows (T, width) in `dtype` of values in 8 bits and their scales (T, blocks)."""
    num_rows, width = values.shape
    num_blocks = scales.shape[1]
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    blocks = min(BLOCKS_ELEMENTS // block, power_of_two(num_blocks))
    launch(
        "eight_bits.restore_blocks", (num_rows, -(-num_blocks // blocks)), out, values, scales,
        width, num_blocks, block_size=block, blocks=blocks, num_warps=WARPS,
    )  # fmt: skip
    return out
