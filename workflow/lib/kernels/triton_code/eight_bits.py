"""GPU kernels of matmuls in 8 bits, in Triton; `eight_bits.matmul` calls and describes them.

Divisions are those of IEEE 754 (`div_rn`), so that the CPU's emulation gives the same bits. Offsets
are int64, as in `elementwise`. Activations are multiplied by the inverse of their scale: a division
of each would take as long as memory."""

import triton
import triton.language as tl


@triton.jit
def _block_scales(absmax, nested_absmax, nested_code, offset, blocks, inside, double: tl.constexpr):
    """Return the decoded scales of some blocks of NF4 weights, fp32; 0 outside."""
    if double:
        stored = absmax.to(tl.pointer_type(tl.uint8), bitcast=True)
        index = tl.load(stored + blocks, mask=inside, other=0).to(tl.int32)
        # 256: `frozen_linear.NESTED_BLOCK_SIZE`
        nested = tl.load(nested_absmax + blocks // 256, mask=inside, other=0.0)
        scale = tl.load(nested_code + index) * nested + tl.load(offset)
    else:
        scale = tl.load(absmax + blocks, mask=inside, other=0.0)
    return tl.where(inside, scale, 0.0)


@triton.jit
def _in_range(largest, most: tl.constexpr):
    """Return the scale that brings `largest` to `most`, the format's largest value; never 0."""
    return tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + most), 1e-30)


@triton.jit
def row_scales(
    scales, absmax, nested_absmax, nested_code, offset, row_blocks,
    most: tl.constexpr, double: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """One row of weights: its largest block scale, brought to `most`."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((size,), dtype=tl.float32)
    for start in range(0, row_blocks, size):
        block = start + tl.arange(0, size)
        inside = block < row_blocks
        block_scales = _block_scales(
            absmax, nested_absmax, nested_code, offset, row * row_blocks + block, inside, double
        )
        largest = tl.maximum(largest, tl.abs(block_scales))
    tl.store(scales + row, _in_range(tl.max(largest, 0), most))


@triton.jit
def decode_rows(
    out, packed, absmax, nested_absmax, code, nested_code, offset, scales,
    num_blocks, first, length, stride, scale_blocks,
    block_size: tl.constexpr, double: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """`blocks` blocks of some rows of all experts, each divided by its scale, which `scale_blocks`
    blocks share: `length` blocks from each of `first`, `first` + `stride`, and so on."""
    # Numbers of blocks are int32, which are faster to divide.
    block = tl.program_id(0) * blocks + tl.arange(0, blocks)
    inside = block < num_blocks
    number = first + block // length * stride + block % length
    stored = number.to(tl.int64)
    scale = _block_scales(absmax, nested_absmax, nested_code, offset, stored, inside, double)
    scale = tl.div_rn(scale, tl.load(scales + number // scale_blocks, mask=inside, other=1.0))
    kind: tl.constexpr = out.dtype.element_ty
    high, low = _decoded(packed, code, stored, scale, inside, kind, block_size)
    at = block.to(tl.int64)[:, None] * block_size + tl.arange(0, block_size)[None, :]
    tl.store(out + at, tl.interleave(high, low), mask=inside[:, None])


@triton.jit
def decode_columns(
    out, packed, absmax, nested_absmax, code, nested_code, offset, scales,
    expert_rows, row_blocks, first, scale_blocks,
    block_size: tl.constexpr, double: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """One block of each of `rows` rows of an expert, written along the rows: of some columns, which
    begin with the block `first`. Weights of even columns and of odd ones are stored apart: each
    store goes along whole lines of the output, and nothing is interleaved only to be taken apart
    again (5 times as fast on an H200)."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    expert = tl.program_id(2).to(tl.int64)
    inside = row < expert_rows
    block = (expert * expert_rows + row) * row_blocks + first + tl.program_id(1)
    scale = _block_scales(absmax, nested_absmax, nested_code, offset, block, inside, double)
    scale = tl.div_rn(scale, tl.load(scales + block // scale_blocks, mask=inside, other=1.0))
    kind: tl.constexpr = out.dtype.element_ty
    even, odd = _decoded(packed, code, block, scale, inside, kind, block_size)
    columns = tl.num_programs(1) * block_size
    feature = tl.program_id(1) * block_size + 2 * tl.arange(0, block_size // 2)
    at = feature[None, :] * expert_rows + row[:, None]
    out += expert * columns * expert_rows
    tl.store(out + at, even, mask=inside[:, None])
    tl.store(out + at + expert_rows, odd, mask=inside[:, None])


@triton.jit
def _decoded(packed, code, block, scale, inside, kind: tl.constexpr, block_size: tl.constexpr):
    """Return a block's weights at even and odd places, times `scale` (blocks,)."""
    half: tl.constexpr = block_size // 2
    packed = packed.to(tl.pointer_type(tl.uint8), bitcast=True)
    bytes_at = block[:, None] * half + tl.arange(0, half)[None, :]
    pairs = tl.load(packed + bytes_at, mask=inside[:, None], other=0).to(tl.int32)
    even = (tl.load(code + (pairs >> 4)) * scale[:, None]).to(kind)
    odd = (tl.load(code + (pairs & 15)) * scale[:, None]).to(kind)
    return even, odd


@triton.jit
def round_rows(
    out, scales, x, factors,
    width,
    most: tl.constexpr, folds: tl.constexpr, whole: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """One row with one scale; `folds`: times the factors of its columns before; `whole`: the row is
    read once, and is in registers until its scale is known."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, size)
    if whole:
        value = _loaded(x, factors, row, column, width, folds)
        scale = scale_of(value, 0, most)
        store_eight_bits(out + row * width, value, scale, column, width)
    else:
        largest = tl.zeros((size,), dtype=tl.float32)
        for start in range(0, width, size):
            value = _loaded(x, factors, row, start + column, width, folds)
            largest = tl.maximum(largest, _finite_or_infinite(value))
        scale = _in_range(tl.max(largest, 0), most)
        for start in range(0, width, size):
            value = _loaded(x, factors, row, start + column, width, folds)
            store_eight_bits(out + row * width, value, scale, start + column, width)
    tl.store(scales + row, scale)


@triton.jit
def scale_of(value, axis: tl.constexpr, most: tl.constexpr):
    """Return the scale of fp32 values along an axis."""
    return _in_range(tl.max(_finite_or_infinite(value), axis), most)


@triton.jit
def _finite_or_infinite(value):
    """Return absolute values, infinity for NaN: a maximum would pass NaN over."""
    return tl.where(value == value, tl.abs(value), float("inf"))


@triton.jit
def store_eight_bits(out, value, scale, column, width):
    """Write fp32 values of a row over their scale in 8 bits."""
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    tl.store(out + column, (value * inverse).to(out.dtype.element_ty), mask=column < width)


@triton.jit
def _loaded(x, factors, row, column, width, folds: tl.constexpr):
    """Return some columns of a row times their factors, fp32; 0 after its end."""
    value = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    if folds:
        value *= tl.load(factors + column, mask=column < width, other=0.0)
    return value


@triton.jit
def round_weight(
    out, weight, scales,
    rows, columns, expert_stride, row_stride, scale_expert_stride, scale_row_stride,
    transposed: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    """A tile of an expert's weights over their rows' scales; `transposed`: stored by columns, along
    whole lines of the output."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    expert = tl.program_id(2).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = expert * expert_stride + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale_at = expert * scale_expert_stride + row * scale_row_stride
    scale = tl.load(scales + scale_at, mask=row < rows, other=1.0)
    value *= tl.div_rn(tl.zeros_like(scale) + 1.0, scale)[:, None]
    out += expert * rows * columns
    made = value.to(out.dtype.element_ty)
    if transposed:
        at = column.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(out + at, tl.trans(made), mask=tl.trans(inside))
    else:
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out + at, made, mask=inside)
