"""GPU kernels of a mixture's experts, in Triton; `grouped_matmul` calls and describes them.

Rows are sorted by expert. Only the device knows where an expert's rows end, so grids are as large
as the worst routing needs, and programs without work end at once."""

import triton
import triton.language as tl

from workflow.lib.kernels.triton_code.elementwise import act


@triton.jit
def row_tiles(
    tiles,
    ends,
    num_experts,
    num_tiles,
    rows: tl.constexpr,
    size: tl.constexpr,
    tile_count: tl.constexpr,
):
    """Expert and first row of `tile_count` tiles of `rows` rows of one expert; the last of each
    expert may have fewer. A tile without an expert gets -1."""
    number = tl.arange(0, size)
    inside_experts = number < num_experts
    stops = tl.load(ends + number, mask=inside_experts, other=0)
    starts = tl.load(ends + number - 1, mask=inside_experts & (number > 0), other=0)
    counts = tl.where(inside_experts, tl.cdiv(stops - starts, rows), 0)
    last = tl.cumsum(counts, 0)
    tile = tl.program_id(0) * tile_count + tl.arange(0, tile_count)
    expert = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    shift = starts - (last - counts) * rows
    first = tl.sum(tl.where(number[None, :] == expert[:, None], shift[None, :], 0), 1) + tile * rows
    inside = tile < num_tiles
    tl.store(tiles + tile, tl.where(expert < num_experts, expert, -1), mask=inside)
    tl.store(tiles + num_tiles + tile, first, mask=inside)


@triton.jit
def rows_matmul(
    out, x, weights, order, tiles, ends, low, small, bias, x_scales, weight_scales,
    num_columns, width, rank, num_tiles, top_k, out_stride, x_stride, weight_expert, weight_column,
    weight_depth, small_expert, small_column, small_rank, bias_stride, scale,
    by_token: tl.constexpr, updated: tl.constexpr, biased: tl.constexpr, scaled: tl.constexpr,
    even: tl.constexpr, rows: tl.constexpr, parts: tl.constexpr, halves: tl.constexpr,
    columns: tl.constexpr, depth: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """A tile of x W^T: `rows` rows of one expert, one of `parts` parts of a tile of the table, and
    `columns` of its outputs. halves: half as many rows for a short tile. by_token: a row of x is a
    token's, found by the place of a row. updated: the sum begins with scale * low small^T. scaled:
    x and W are multiplied by a scale of the row and one of the expert. even: `width` and
    `num_columns` are whole tiles."""
    column_tiles = tl.cdiv(num_columns, columns)
    part = tl.program_id(0) // column_tiles
    tile = part // parts
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    last = tl.load(ends + expert) - 1
    first = tl.load(tiles + num_tiles + tile) + part % parts * rows
    if first > last:
        return
    column_start = tl.program_id(0) % column_tiles * columns
    if halves and last - first < rows // 2:
        _rows_tile(
            out, x, weights, order, low, small, bias, x_scales, weight_scales,
            num_columns, width, rank, top_k, out_stride, x_stride,
            weight_expert, weight_column, weight_depth, small_expert, small_column, small_rank,
            bias_stride, scale, expert, first, last, column_start,
            by_token, updated, biased, scaled, even, columns, depth, ranks, rows // 2,
        )  # fmt: skip
    else:
        _rows_tile(
            out, x, weights, order, low, small, bias, x_scales, weight_scales,
            num_columns, width, rank, top_k, out_stride, x_stride,
            weight_expert, weight_column, weight_depth, small_expert, small_column, small_rank,
            bias_stride, scale, expert, first, last, column_start,
            by_token, updated, biased, scaled, even, columns, depth, ranks, rows,
        )  # fmt: skip


@triton.jit
def _rows_tile(
    out, x, weights, order, low, small, bias, x_scales, weight_scales,
    num_columns, width, rank, top_k, out_stride, x_stride,
    weight_expert, weight_column, weight_depth, small_expert, small_column, small_rank,
    bias_stride, scale, expert, first, last, column_start,
    by_token: tl.constexpr, updated: tl.constexpr, biased: tl.constexpr, scaled: tl.constexpr,
    even: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, ranks: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
    """The tile of `rows` rows from `first` on of an expert whose last row is `last`."""
    row = first + tl.arange(0, rows)
    inside = row <= last
    # Rows after the last repeat the last one, and are not stored.
    row = tl.minimum(row, last).to(tl.int64)
    source = row
    if by_token:
        source = tl.load(order + row) // top_k
    column = column_start + tl.arange(0, columns)
    in_width = column < num_columns
    total = tl.zeros((rows, columns), dtype=tl.float32)
    if updated:
        for start in range(0, rank, ranks):
            rank_column = start + tl.arange(0, ranks)
            one = tl.load(
                low + row[:, None] * rank + rank_column[None, :],
                mask=rank_column[None, :] < rank,
                other=0.0,
            )
            other = tl.load(
                small
                + expert * small_expert
                + column[None, :] * small_column
                + rank_column[:, None] * small_rank,
                mask=(rank_column[:, None] < rank) & in_width[None, :],
                other=0.0,
            )
            total = tl.dot(one, other, total, input_precision="ieee")
        total *= scale
    if scaled:
        row_scale = tl.load(x_scales + source)[:, None]
        expert_scale = tl.load(weight_scales + expert)
        # The initial sum is multiplied by both scales at the end. Neither is 0.
        total = total / row_scale / expert_scale
    rank_column = tl.arange(0, depth)
    left = x + source[:, None] * x_stride + rank_column[None, :]
    right = (
        weights
        + expert * weight_expert
        + column[None, :] * weight_column
        + rank_column[:, None] * weight_depth
    )
    for start in range(0, width, depth):
        if even:
            one = tl.load(left)
            other = tl.load(right)
        else:
            inside_width = start + rank_column < width
            one = tl.load(left, mask=inside_width[None, :], other=0.0)
            other = tl.load(right, mask=inside_width[:, None] & in_width[None, :], other=0.0)
        total = tl.dot(one, other, total, input_precision="ieee")
        left += depth
        right += depth * weight_depth
    if scaled:
        total = total * row_scale * expert_scale
    if biased:
        added = tl.load(bias + expert * bias_stride + column, mask=in_width, other=0.0)
        total += added.to(tl.float32)[None, :]
    at = out + row[:, None] * out_stride + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None] & in_width[None, :])


@triton.jit
def weights_matmul(
    out, left, right, order, ends,
    num_columns, rank, top_k, left_stride, right_stride, out_expert, out_rank, out_column, scale,
    by_token: tl.constexpr, columns: tl.constexpr, ranks: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Some columns of the sum over one expert's rows of the outer products of left (R, rank) and
    right (R, num_columns), times `scale`; by_token: the rows of `right` are tokens'."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    expert = tl.program_id(1).to(tl.int64)
    number = tl.program_id(2) * ranks + tl.arange(0, ranks)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    total = tl.zeros((columns, ranks), dtype=tl.float32)
    for first in range(start, stop, depth):
        row = first + tl.arange(0, depth)
        inside = row < stop
        source = row.to(tl.int64)
        if by_token:
            source = tl.load(order + row, mask=inside, other=0) // top_k
        one = tl.load(
            right + source[:, None] * right_stride + column[None, :],
            mask=inside[:, None] & (column < num_columns)[None, :],
            other=0.0,
        )
        other = tl.load(
            left + row.to(tl.int64)[:, None] * left_stride + number[None, :],
            mask=inside[:, None] & (number < rank)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(one), other, total, input_precision="ieee")
    at = (
        out
        + expert * out_expert
        + number.to(tl.int64)[None, :] * out_rank
        + column.to(tl.int64)[:, None] * out_column
    )
    inside_tile = (column < num_columns)[:, None] & (number < rank)[None, :]
    tl.store(at, total * scale, mask=inside_tile)


@triton.jit
def transpose(out, x, num_rows, num_columns, size: tl.constexpr):
    """A square of x (num_rows, num_columns), transposed."""
    across = tl.cdiv(num_columns, size)
    row = (tl.program_id(0) // across).to(tl.int64) * size + tl.arange(0, size)
    column = (tl.program_id(0) % across).to(tl.int64) * size + tl.arange(0, size)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    values = tl.load(x + row[:, None] * num_columns + column[None, :], mask=inside, other=0.0)
    at = out + column[:, None] * num_rows + row[None, :]
    tl.store(at, tl.trans(values).to(out.dtype.element_ty), mask=tl.trans(inside))


@triton.jit
def _gate_and_other(up, row, first, width, alternating: tl.constexpr, size: tl.constexpr):
    """Columns of gate and up (size,) fp32, in halves or alternating; 0 after the last."""
    at = up + row * 2 * width
    if alternating:
        both = 2 * first + tl.arange(0, 2 * size)
        values = tl.load(at + both, mask=both < 2 * width, other=0.0).to(tl.float32)
        gate, other = tl.split(tl.reshape(values, (size, 2)))
    else:
        column = first + tl.arange(0, size)
        gate = tl.load(at + column, mask=column < width, other=0.0).to(tl.float32)
        other = tl.load(at + width + column, mask=column < width, other=0.0).to(tl.float32)
    return gate, other


@triton.jit
def _store_both(up, row, first, width, gate, other, alternating: tl.constexpr, size: tl.constexpr):
    """Write them back where they were read."""
    dtype = up.dtype.element_ty
    at = up + row * 2 * width
    if alternating:
        both = 2 * first + tl.arange(0, 2 * size)
        tl.store(at + both, tl.interleave(gate, other).to(dtype), mask=both < 2 * width)
    else:
        column = first + tl.arange(0, size)
        tl.store(at + column, gate.to(dtype), mask=column < width)
        tl.store(at + width + column, other.to(dtype), mask=column < width)


@triton.jit
def _factors(gate, other, alpha, limit, kind: tl.constexpr):
    """The factors of gate and up, and their derivatives. `clamped`: g sigmoid(alpha g)
    with g at most `limit`, and u + 1 with u within +-`limit`. NaN stays NaN."""
    if kind == "clamped":
        low = tl.where(gate > limit, limit, gate)
        share = 1.0 / (1.0 + tl.exp(-alpha * low))
        value = low * share
        rise = tl.where(gate > limit, 0.0, share * (1.0 + alpha * low * (1.0 - share)))
        outside = (other > limit) | (other < -limit)
        factor = tl.where(outside, tl.where(other > limit, limit, -limit), other) + 1.0
        slope = tl.where(outside, 0.0, 1.0)
    else:
        value, rise = act(gate, kind)
        factor, slope = other, tl.zeros_like(other) + 1.0
    return value, rise, factor, slope


@triton.jit
def gated(
    product, up, width, alpha, limit,
    kind: tl.constexpr, alternating: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Some columns of one row: the factors of gate and up, multiplied."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * size
    gate, other = _gate_and_other(up, row, first, width, alternating, size)
    value, _, factor, _ = _factors(gate, other, alpha, limit, kind)
    column = first + tl.arange(0, size)
    at = product + row * width + column
    tl.store(at, (value * factor).to(product.dtype.element_ty), mask=column < width)


@triton.jit
def gated_backward(
    grad_weights, grad, up, weights, order, width, alpha, limit,
    kind: tl.constexpr, alternating: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """One row, in place: `grad` becomes the product, `up` the gradient of it times the row's
    weight. The gradient of that weight is the sum of the gradient times the product."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(order + row)
    weight = tl.load(weights + position).to(tl.float32)
    total = tl.zeros((size,), dtype=tl.float32)
    for first in range(0, width, size):
        column = first + tl.arange(0, size)
        inside, at = column < width, grad + row * width + column
        steep = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        gate, other = _gate_and_other(up, row, first, width, alternating, size)
        value, rise, factor, slope = _factors(gate, other, alpha, limit, kind)
        total += steep * value * factor
        steep *= weight
        tl.store(at, (value * factor).to(grad.dtype.element_ty), mask=inside)
        grad_gate, grad_up = steep * factor * rise, steep * value * slope
        _store_both(up, row, first, width, grad_gate, grad_up, alternating, size)
    tl.store(grad_weights + position, tl.sum(total, 0))
