"""GPU kernels that add matmuls of low rank to their inputs, in Triton; `gating` calls and describes
them.

A program has some columns of `steps` tiles of rows. It reads its columns of the right factors once,
the first `chunk` ranks of them, and a tile's values while it computes the tile before. Starts of
tiles are int64, as in `elementwise`, offsets in a tile int32. A program overwrites the tiles that
it has read. Rows of gate and up begin `gate_distance` elements apart: they may be halves of one
value."""

import triton
import triton.language as tl

from workflow.lib.kernels.triton_code.elementwise import act


@triton.jit
def add_low_rank(
    total, other,
    low, small, scale, low_stride, small_stride, column_stride, num_rows, width,
    rank: tl.constexpr, adds_other: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    chunk: tl.constexpr, steps: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Add scale * low @ small, and `other` if there is one, to `total`."""
    first, row, column, column_inside = _tiles(width, rows, columns, steps)
    right = _right(small, small_stride, column_stride, column, column_inside, 0, rank, chunk)
    for step in tl.range(0, steps, num_stages=stages):
        start = first + step * rows
        row_inside = row < num_rows - start
        at = start * width + (row[:, None] * width + column[None, :])
        inside = row_inside[:, None] & column_inside[None, :]
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        if adds_other:
            value += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        value += scale * _low_rank(
            low + start * low_stride, small, low_stride, small_stride, column_stride,
            row, column, row_inside, column_inside, right, rank, chunk,
        )  # fmt: skip
        tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def act_and_mul(
    product, gate, up, gate_distance, multiplier,
    gate_low, gate_small, gate_scale, gate_low_stride, gate_small_stride, gate_column_stride,
    up_low, up_small, up_scale, up_low_stride, up_small_stride, up_column_stride, num_rows, width,
    gate_rank: tl.constexpr, up_rank: tl.constexpr, kind: tl.constexpr, rows: tl.constexpr,
    columns: tl.constexpr, chunk: tl.constexpr, steps: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    first, row, column, column_inside = _tiles(width, rows, columns, steps)
    gate_right = _right(
        gate_small, gate_small_stride, gate_column_stride, column, column_inside, 0, gate_rank,
        chunk,
    )  # fmt: skip
    up_right = _right(
        up_small, up_small_stride, up_column_stride, column, column_inside, 0, up_rank, chunk
    )
    for step in tl.range(0, steps, num_stages=stages):
        start = first + step * rows
        row_inside = row < num_rows - start
        inside = row_inside[:, None] & column_inside[None, :]
        at = start * width + (row[:, None] * width + column[None, :])
        gate_at = start * gate_distance + (row[:, None] * gate_distance + column[None, :])
        lower = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
        upper = tl.load(up + gate_at, mask=inside, other=0.0).to(tl.float32)
        lower += gate_scale * _low_rank(
            gate_low + start * gate_low_stride, gate_small, gate_low_stride, gate_small_stride,
            gate_column_stride, row, column, row_inside, column_inside, gate_right, gate_rank,
            chunk,
        )  # fmt: skip
        upper += up_scale * _low_rank(
            up_low + start * up_low_stride, up_small, up_low_stride, up_small_stride,
            up_column_stride, row, column, row_inside, column_inside, up_right, up_rank, chunk,
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
    rows: tl.constexpr, columns: tl.constexpr, chunk: tl.constexpr, steps: tl.constexpr,
    stages: tl.constexpr,
):  # fmt: skip
    """In place: `grad` becomes the product, `gate` and `up` their gradients."""
    first, row, column, column_inside = _tiles(width, rows, columns, steps)
    gate_right = _right(
        gate_small, gate_small_stride, gate_column_stride, column, column_inside, 0, gate_rank,
        chunk,
    )  # fmt: skip
    up_right = _right(
        up_small, up_small_stride, up_column_stride, column, column_inside, 0, up_rank, chunk
    )
    grad_right = _right(
        grad_small, grad_small_stride, grad_column_stride, column, column_inside, 0, grad_rank,
        chunk,
    )  # fmt: skip
    dtype = grad.dtype.element_ty
    for step in tl.range(0, steps, num_stages=stages):
        start = first + step * rows
        row_inside = row < num_rows - start
        inside = row_inside[:, None] & column_inside[None, :]
        at = start * width + (row[:, None] * width + column[None, :])
        gate_at = start * gate_distance + (row[:, None] * gate_distance + column[None, :])
        # All three are read before the first is written.
        lower = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
        upper = tl.load(up + gate_at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        lower += gate_scale * _low_rank(
            gate_low + start * gate_low_stride, gate_small, gate_low_stride, gate_small_stride,
            gate_column_stride, row, column, row_inside, column_inside, gate_right, gate_rank,
            chunk,
        )  # fmt: skip
        upper += up_scale * _low_rank(
            up_low + start * up_low_stride, up_small, up_low_stride, up_small_stride,
            up_column_stride, row, column, row_inside, column_inside, up_right, up_rank, chunk,
        )  # fmt: skip
        slope += grad_scale * _low_rank(
            grad_low + start * grad_low_stride, grad_small, grad_low_stride, grad_small_stride,
            grad_column_stride, row, column, row_inside, column_inside, grad_right, grad_rank,
            chunk,
        )  # fmt: skip
        value, derivative = act(lower * multiplier, kind)
        tl.store(grad + at, (value * upper).to(dtype), mask=inside)
        tl.store(gate + gate_at, (slope * upper * derivative * multiplier).to(dtype), mask=inside)
        tl.store(up + gate_at, (slope * value).to(dtype), mask=inside)


@triton.jit
def _tiles(width, rows: tl.constexpr, columns: tl.constexpr, steps: tl.constexpr):
    """Return the first row of this program's tiles, a tile's rows from 0 on, the columns, and
    which of these exist."""
    column_tiles = tl.cdiv(width, columns)
    first = (tl.program_id(0) // column_tiles).to(tl.int64) * (rows * steps)
    column = tl.program_id(0) % column_tiles * columns + tl.arange(0, columns)
    return first, tl.arange(0, rows), column, column < width


@triton.jit
def _right(
    small, small_stride, column_stride, column, column_inside, start,
    rank: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Return `chunk` rows of small (rank, columns) from `start` on; 0 beyond its rank."""
    number = start + tl.arange(0, chunk)
    return tl.load(
        small + number[:, None] * small_stride + column[None, :] * column_stride,
        mask=(number < rank)[:, None] & column_inside[None, :],
        other=0.0,
    )


@triton.jit
def _low_rank(
    low, small, low_stride, small_stride, column_stride, row, column, row_inside, column_inside,
    right, rank: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Return a tile of low (rows, rank) @ small (rank, columns), fp32: `chunk` ranks at a time.
    right: of the first ones."""
    total = tl.zeros((row.shape[0], column.shape[0]), dtype=tl.float32)
    if rank > 0:
        left = _left(low, low_stride, row, row_inside, 0, rank, chunk)
        total += tl.dot(left, right, input_precision="ieee")
    for start in range(chunk, rank, chunk):
        left = _left(low, low_stride, row, row_inside, start, rank, chunk)
        more = _right(small, small_stride, column_stride, column, column_inside, start, rank, chunk)
        total += tl.dot(left, more, input_precision="ieee")
    return total


@triton.jit
def _left(low, low_stride, row, row_inside, start, rank: tl.constexpr, chunk: tl.constexpr):
    """Return `chunk` columns of low (rows, rank) from `start` on; 0 beyond its rank."""
    number = start + tl.arange(0, chunk)
    return tl.load(
        low + row[:, None] * low_stride + number[None, :],
        mask=row_inside[:, None] & (number < rank)[None, :],
        other=0.0,
    )
