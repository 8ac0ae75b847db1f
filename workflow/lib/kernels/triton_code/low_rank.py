"""GPU kernels that add matmuls of low rank to their inputs, in Triton; `gating` calls and describes
them.

A program has a tile of rows and columns. Offsets are int64, as in `elementwise`, and a program
overwrites the tiles that it has read. Rows of gate and up begin `gate_distance` elements apart:
they may be halves of one value."""

import triton
import triton.language as tl

from workflow.lib.kernels.triton_code.elementwise import act


@triton.jit
def add_low_rank(
    total, other,
    low, small, scale, low_stride, small_stride, column_stride, num_rows, width,
    rank: tl.constexpr, adds_other: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    chunk: tl.constexpr,
):  # fmt: skip
    """Add scale * low @ small, and `other` if there is one, to `total`."""
    row, column, row_inside, column_inside = _tile(num_rows, width, rows, columns)
    update = _low_rank(
        low, small, low_stride, small_stride, column_stride,
        row, column, row_inside, column_inside, rank, chunk,
    )  # fmt: skip
    at = row[:, None] * width + column[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) + update * scale
    if adds_other:
        value += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def act_and_mul(
    product, gate, up, gate_distance, multiplier,
    gate_low, gate_small, gate_scale, gate_low_stride, gate_small_stride, gate_column_stride,
    up_low, up_small, up_scale, up_low_stride, up_small_stride, up_column_stride, num_rows, width,
    gate_rank: tl.constexpr, up_rank: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr,
    columns: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    row, column, row_inside, column_inside = _tile(num_rows, width, rows, columns)
    at = row[:, None] * width + column[None, :]
    gate_at = row[:, None] * gate_distance + column[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    lower = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    lower += gate_scale * _low_rank(
        gate_low, gate_small, gate_low_stride, gate_small_stride, gate_column_stride,
        row, column, row_inside, column_inside, gate_rank, chunk,
    )  # fmt: skip
    upper = tl.load(up + gate_at, mask=inside, other=0.0).to(tl.float32)
    upper += up_scale * _low_rank(
        up_low, up_small, up_low_stride, up_small_stride, up_column_stride,
        row, column, row_inside, column_inside, up_rank, chunk,
    )  # fmt: skip
    value, _ = act(lower * multiplier, kind)
    tl.store(product + at, (value * upper).to(product.dtype.element_ty), mask=inside)


@triton.jit
def act_and_mul_backward(
    grad, gate, up, gate_distance, multiplier,
    gate_low, gate_small, gate_scale, gate_low_stride, gate_small_stride, gate_column_stride,
    up_low, up_small, up_scale, up_low_stride, up_small_stride, up_column_stride,
    grad_low, grad_small, grad_scale, grad_low_stride, grad_small_stride, grad_column_stride,
    num_rows, width,
    gate_rank: tl.constexpr, up_rank: tl.constexpr, grad_rank: tl.constexpr, kind: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """In place: `grad` becomes the product, `gate` and `up` their gradients."""
    row, column, row_inside, column_inside = _tile(num_rows, width, rows, columns)
    at = row[:, None] * width + column[None, :]
    gate_at = row[:, None] * gate_distance + column[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    # All three are read before the first is written.
    lower = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    lower += gate_scale * _low_rank(
        gate_low, gate_small, gate_low_stride, gate_small_stride, gate_column_stride,
        row, column, row_inside, column_inside, gate_rank, chunk,
    )  # fmt: skip
    upper = tl.load(up + gate_at, mask=inside, other=0.0).to(tl.float32)
    upper += up_scale * _low_rank(
        up_low, up_small, up_low_stride, up_small_stride, up_column_stride,
        row, column, row_inside, column_inside, up_rank, chunk,
    )  # fmt: skip
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    slope += grad_scale * _low_rank(
        grad_low, grad_small, grad_low_stride, grad_small_stride, grad_column_stride,
        row, column, row_inside, column_inside, grad_rank, chunk,
    )  # fmt: skip
    value, derivative = act(lower * multiplier, kind)
    dtype = grad.dtype.element_ty
    tl.store(grad + at, (value * upper).to(dtype), mask=inside)
    tl.store(gate + gate_at, (slope * upper * derivative * multiplier).to(dtype), mask=inside)
    tl.store(up + gate_at, (slope * value).to(dtype), mask=inside)


@triton.jit
def _tile(num_rows, width, rows: tl.constexpr, columns: tl.constexpr):
    """Return the rows and columns of this program's tile, and their masks."""
    column_tiles = tl.cdiv(width, columns)
    program = tl.program_id(0).to(tl.int64)
    row = program // column_tiles * rows + tl.arange(0, rows)
    column = program % column_tiles * columns + tl.arange(0, columns)
    return row, column, row < num_rows, column < width


@triton.jit
def _low_rank(
    low, small, low_stride, small_stride, column_stride, row, column, row_inside, column_inside,
    rank: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Return a tile of low (rows, rank) @ small (rank, columns), fp32: `chunk` ranks at a time."""
    total = tl.zeros((row.shape[0], column.shape[0]), dtype=tl.float32)
    for start in range(0, rank, chunk):
        number = start + tl.arange(0, chunk)
        inside = number < rank
        left = tl.load(
            low + row[:, None] * low_stride + number[None, :],
            mask=row_inside[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            small + number[:, None] * small_stride + column[None, :] * column_stride,
            mask=inside[:, None] & column_inside[None, :],
            other=0.0,
        )
        total += tl.dot(left, right, input_precision="ieee")
    return total
