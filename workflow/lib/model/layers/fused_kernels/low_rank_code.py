"""GPU kernels that add products of low rank to what they read, in Triton; `low_rank` calls them and
says what they compute.

A program has a tile of rows and columns, or one tile after the other where it sums over columns.
Offsets are int64, as in `triton_kernels`, and tiles are written over by the program that has read
them.
"""

import triton
import triton.language as tl

from workflow.lib.model.layers.triton_kernels import act


@triton.jit
def add_low_rank(
    total,
    other,
    low,
    small,
    scale,
    low_stride,
    small_stride,
    column_stride,
    num_rows,
    width,
    rank: tl.constexpr,
    adds_other: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    chunk: tl.constexpr,
):
    """Add scale * low @ small, and `other` if there is one, to `total`."""
    row, there, _, start = _place(num_rows, width, rows, columns)
    column = start + tl.arange(0, columns)
    right_there = column < width
    update = _low_rank(
        low, small, low_stride, small_stride, column_stride,
        row, column, there, right_there, rank, chunk,
    )  # fmt: skip
    at = row[:, None] * width + column[None, :]
    inside = there[:, None] & right_there[None, :]
    value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) + update * scale
    if adds_other:
        value += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)


@triton.jit
def act_and_mul(
    product,
    gate,
    up,
    gate_low,
    gate_small,
    gate_scale,
    gate_low_stride,
    gate_small_stride,
    gate_column_stride,
    up_low,
    up_small,
    up_scale,
    up_low_stride,
    up_small_stride,
    up_column_stride,
    sums,
    taker,
    taker_stride,
    taker_column_stride,
    num_rows,
    width,
    gate_rank: tl.constexpr,
    up_rank: tl.constexpr,
    taker_rank: tl.constexpr,
    kind: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    tiles: tl.constexpr,
    chunk: tl.constexpr,
    ranks: tl.constexpr,
):
    """The product, and its sums over these columns with `taker`, if that has a rank."""
    row, there, number, start = _place(num_rows, width, rows, columns * tiles)
    total = tl.zeros((rows, ranks), dtype=tl.float32)
    for tile in range(tiles):
        column = start + tile * columns + tl.arange(0, columns)
        right_there = column < width
        at = row[:, None] * width + column[None, :]
        inside = there[:, None] & right_there[None, :]
        lower = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        lower += gate_scale * _low_rank(
            gate_low, gate_small, gate_low_stride, gate_small_stride, gate_column_stride,
            row, column, there, right_there, gate_rank, chunk,
        )  # fmt: skip
        upper = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        upper += up_scale * _low_rank(
            up_low, up_small, up_low_stride, up_small_stride, up_column_stride,
            row, column, there, right_there, up_rank, chunk,
        )  # fmt: skip
        value, _ = act(lower, kind)
        value = (value * upper).to(product.dtype.element_ty)
        tl.store(product + at, value, mask=inside)
        total = _summed(
            total, value, taker, taker_stride, taker_column_stride, column, width, taker_rank
        )
    _store_sum(sums, total, row, there, number, num_rows, taker_rank)


@triton.jit
def act_and_mul_backward(
    grad,
    gate,
    up,
    gate_low,
    gate_small,
    gate_scale,
    gate_low_stride,
    gate_small_stride,
    gate_column_stride,
    up_low,
    up_small,
    up_scale,
    up_low_stride,
    up_small_stride,
    up_column_stride,
    grad_low,
    grad_small,
    grad_scale,
    grad_low_stride,
    grad_small_stride,
    grad_column_stride,
    product_sums,
    product_taker,
    product_taker_stride,
    product_taker_column_stride,
    gate_sums,
    gate_taker,
    gate_taker_stride,
    gate_taker_column_stride,
    up_sums,
    up_taker,
    up_taker_stride,
    up_taker_column_stride,
    num_rows,
    width,
    gate_rank: tl.constexpr,
    up_rank: tl.constexpr,
    grad_rank: tl.constexpr,
    product_taker_rank: tl.constexpr,
    gate_taker_rank: tl.constexpr,
    up_taker_rank: tl.constexpr,
    kind: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    tiles: tl.constexpr,
    chunk: tl.constexpr,
    ranks: tl.constexpr,
):
    """In place: `grad` becomes the product, `gate` and `up` their gradients; and their sums."""
    row, there, number, start = _place(num_rows, width, rows, columns * tiles)
    of_product = tl.zeros((rows, ranks), dtype=tl.float32)
    of_gate = tl.zeros((rows, ranks), dtype=tl.float32)
    of_up = tl.zeros((rows, ranks), dtype=tl.float32)
    dtype = grad.dtype.element_ty
    for tile in range(tiles):
        column = start + tile * columns + tl.arange(0, columns)
        right_there = column < width
        at = row[:, None] * width + column[None, :]
        inside = there[:, None] & right_there[None, :]
        # All three are read before the first is written.
        lower = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        lower += gate_scale * _low_rank(
            gate_low, gate_small, gate_low_stride, gate_small_stride, gate_column_stride,
            row, column, there, right_there, gate_rank, chunk,
        )  # fmt: skip
        upper = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        upper += up_scale * _low_rank(
            up_low, up_small, up_low_stride, up_small_stride, up_column_stride,
            row, column, there, right_there, up_rank, chunk,
        )  # fmt: skip
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        slope += grad_scale * _low_rank(
            grad_low, grad_small, grad_low_stride, grad_small_stride, grad_column_stride,
            row, column, there, right_there, grad_rank, chunk,
        )  # fmt: skip
        value, derivative = act(lower, kind)
        product = (value * upper).to(dtype)
        gate_slope = (slope * upper * derivative).to(dtype)
        up_slope = (slope * value).to(dtype)
        tl.store(grad + at, product, mask=inside)
        tl.store(gate + at, gate_slope, mask=inside)
        tl.store(up + at, up_slope, mask=inside)
        of_product = _summed(
            of_product, product, product_taker, product_taker_stride, product_taker_column_stride,
            column, width, product_taker_rank,
        )  # fmt: skip
        of_gate = _summed(
            of_gate, gate_slope, gate_taker, gate_taker_stride, gate_taker_column_stride,
            column, width, gate_taker_rank,
        )  # fmt: skip
        of_up = _summed(
            of_up, up_slope, up_taker, up_taker_stride, up_taker_column_stride,
            column, width, up_taker_rank,
        )  # fmt: skip
    _store_sum(product_sums, of_product, row, there, number, num_rows, product_taker_rank)
    _store_sum(gate_sums, of_gate, row, there, number, num_rows, gate_taker_rank)
    _store_sum(up_sums, of_up, row, there, number, num_rows, up_taker_rank)


@triton.jit
def add_sums(
    out,
    sums,
    scale,
    num_rows,
    out_stride,
    parts,
    rank: tl.constexpr,
    rows: tl.constexpr,
    ranks: tl.constexpr,
):
    """Write the sums over all `parts` of the columns (parts, num_rows, rank), times `scale`."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = tl.arange(0, ranks)
    inside = (row < num_rows)[:, None] & (place < rank)[None, :]
    total = tl.zeros((rows, ranks), dtype=tl.float32)
    for part in range(parts):
        at = (part * num_rows + row)[:, None] * rank + place[None, :]
        total += tl.load(sums + at, mask=inside, other=0.0)
    at = row[:, None] * out_stride + place[None, :]
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _place(num_rows, width, rows: tl.constexpr, columns: tl.constexpr):
    """Return this program's rows, which of them there are, the number of its part of the columns,
    and that part's first column.
    """
    parts = tl.cdiv(width, columns)
    program = tl.program_id(0).to(tl.int64)
    row = program // parts * rows + tl.arange(0, rows)
    number = program % parts
    return row, row < num_rows, number, number * columns


@triton.jit
def _summed(total, value, taker, taker_stride, column_stride, column, width, rank: tl.constexpr):
    """Return total + value (rows, columns) @ taker (rank, columns)^T; without a rank total."""
    if rank > 0:
        place = tl.arange(0, total.shape[1])
        inside = (column < width)[:, None] & (place < rank)[None, :]
        at = column[:, None] * column_stride + place[None, :] * taker_stride
        right = tl.load(taker + at, mask=inside, other=0.0)
        total += tl.dot(value, right, input_precision="ieee")
    return total


@triton.jit
def _store_sum(sums, total, row, there, number, num_rows, rank: tl.constexpr):
    """Write the sums (rows, rank) of a part of the columns."""
    if rank > 0:
        place = tl.arange(0, total.shape[1])
        at = (number * num_rows + row)[:, None] * rank + place[None, :]
        tl.store(sums + at, total, mask=there[:, None] & (place < rank)[None, :])


@triton.jit
def _low_rank(
    low,
    small,
    low_stride,
    small_stride,
    column_stride,
    row,
    column,
    there,
    right_there,
    rank: tl.constexpr,
    chunk: tl.constexpr,
):
    """Return a tile of low (rows, rank) @ small (rank, columns), fp32: `chunk` ranks at a time."""
    total = tl.zeros((row.shape[0], column.shape[0]), dtype=tl.float32)
    for start in range(0, rank, chunk):
        place = start + tl.arange(0, chunk)
        inside = place < rank
        left = tl.load(
            low + row[:, None] * low_stride + place[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            small + place[:, None] * small_stride + column[None, :] * column_stride,
            mask=inside[:, None] & right_there[None, :],
            other=0.0,
        )
        total += tl.dot(left, right, input_precision="ieee")
    return total
