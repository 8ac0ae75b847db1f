"""The elementwise GPU kernels, in Triton; `rows`, `nf4` and `experts` describe them.

Offsets are int64: Triton's own are int32, which overflow in tensors of 2^31 elements. A program
reads and writes elements of its own alone, so a kernel may overwrite its inputs."""

import triton
import triton.language as tl


@triton.jit
def dequantize_nf4(
    out, packed, absmax, nested_absmax, code, nested_code, offset,
    num_weights, first, length, stride,
    in_runs: tl.constexpr, block_size: tl.constexpr, double_quant: tl.constexpr,
    num_blocks: tl.constexpr,
):  # fmt: skip
    """Decode `num_blocks` blocks of weights: two weights a byte, the first in the high half.
    in_runs: `length` blocks are read from each of `first`, `first` + `stride`, and so on."""
    # Stored bytes are parameters of type float32 (`frozen_linear`), so their pointers are, too.
    packed = packed.to(tl.pointer_type(tl.uint8), bitcast=True)
    half: tl.constexpr = block_size // 2
    blocks = tl.program_id(0).to(tl.int64) * num_blocks + tl.arange(0, num_blocks)
    inside = blocks * block_size < num_weights
    stored = blocks
    if in_runs:
        stored = first + blocks // length * stride + blocks % length
    if double_quant:
        scales = absmax.to(tl.pointer_type(tl.uint8), bitcast=True)
        index = tl.load(scales + stored, mask=inside, other=0).to(tl.int32)
        # 256: `frozen_linear.NESTED_BLOCK_SIZE`
        nested = tl.load(nested_absmax + stored // 256, mask=inside, other=0.0)
        scale = tl.load(nested_code + index) * nested + tl.load(offset)
    else:
        scale = tl.load(absmax + stored, mask=inside, other=0.0)
    # Of the last block a part may be missing: the mask counts the weights that are written.
    in_block = tl.arange(0, half)[None, :]
    pairs_at = blocks[:, None] * block_size + in_block * 2
    bytes_at = stored[:, None] * half + in_block
    pairs = tl.load(packed + bytes_at, mask=pairs_at < num_weights, other=0).to(tl.int32)
    high = tl.load(code + (pairs >> 4)) * scale[:, None]
    low = tl.load(code + (pairs & 15)) * scale[:, None]
    # Interleaved, neighbouring threads write neighbouring weights; two stores of every second
    # weight would go over the output twice.
    weights = tl.interleave(high, low)
    weights_at = blocks[:, None] * block_size + tl.arange(0, block_size)[None, :]
    tl.store(out + weights_at, weights.to(out.dtype.element_ty), mask=weights_at < num_weights)


@triton.jit
def sum_by_token(
    out, rows, positions, weights, width, top_k, weighted: tl.constexpr, size: tl.constexpr
):
    """One token's rows (top_k of them, at `positions`) times their weights, summed in fp32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * size + tl.arange(0, size)
    inside = column < width
    total = tl.zeros((size,), dtype=tl.float32)
    for choice in range(top_k):
        row = tl.load(positions + token * top_k + choice)
        part = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if weighted:
            part *= tl.load(weights + token * top_k + choice).to(tl.float32)
        total += part
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def act(gate, kind: tl.constexpr):
    """Return act(gate) and its derivative, fp32."""
    if kind == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    # Triton's language has no tanh, but gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(2 u) for
    # u = sqrt(2 / pi) (x + 0.044715 x^3). 1.5957691216057308 is 2 sqrt(2 / pi).
    doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    # 1 - share would lose the digits of a small rest.
    share, complement = 1.0 / (1.0 + tl.exp(-doubled)), 1.0 / (1.0 + tl.exp(doubled))
    slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * gate * gate)
    return gate * share, share + gate * share * complement * slope


@triton.jit
def lengthened_act_and_mul_backward(
    sums, grad, gate, up,
    gate_distance, multiplier, gate_factor, up_factor, num_rows, width,
    kind: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """In place for `rows` rows of some columns: `grad` becomes the product, `gate` and `up` their
    gradients, which are summed with them over these rows, then multiplied by the factors. Rows of
    `gate` and `up` begin `gate_distance` elements apart."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    inside = column < width
    gate_length = tl.load(gate_factor + column, mask=inside, other=0.0)
    up_length = tl.load(up_factor + column, mask=inside, other=0.0)
    gate_sum = tl.zeros((columns,), dtype=tl.float32)
    up_sum = tl.zeros((columns,), dtype=tl.float32)
    dtype = grad.dtype.element_ty
    first = tl.program_id(1).to(tl.int64) * rows
    for row in range(rows):
        offsets = (first + row) * width + column
        gate_offsets = (first + row) * gate_distance + column
        inside_rows = inside & (first + row < num_rows)
        slope = tl.load(grad + offsets, mask=inside_rows, other=0.0).to(tl.float32)
        lower = tl.load(gate + gate_offsets, mask=inside_rows, other=0.0).to(tl.float32)
        upper = tl.load(up + gate_offsets, mask=inside_rows, other=0.0).to(tl.float32)
        value, derivative = act(lower * multiplier, kind)
        lower_slope, upper_slope = slope * upper * derivative * multiplier, slope * value
        gate_sum += lower_slope * lower
        up_sum += upper_slope * upper
        tl.store(grad + offsets, (value * upper).to(dtype), mask=inside_rows)
        tl.store(gate + gate_offsets, (lower_slope * gate_length).to(dtype), mask=inside_rows)
        tl.store(up + gate_offsets, (upper_slope * up_length).to(dtype), mask=inside_rows)
    at = tl.program_id(1).to(tl.int64) * width + column
    tl.store(sums + at, gate_sum, mask=inside)
    tl.store(sums + tl.num_programs(1).to(tl.int64) * width + at, up_sum, mask=inside)


@triton.jit
def lengthen(
    out, direction, factor, out_distance, direction_distance, width, columns: tl.constexpr
):
    """Scale some columns of one row; rows begin `out_distance` and `direction_distance` elements
    apart."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    value = tl.load(direction + row * direction_distance + column, mask=inside, other=0.0)
    value = value.to(tl.float32) * tl.load(factor + column, mask=inside, other=0.0)
    at = out + row * out_distance + column
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def lengthen_backward(
    sums, scaled, grad, y, factor, num_rows, width, rows: tl.constexpr, columns: tl.constexpr
):
    """Scale `rows` rows of some columns of `grad`, and sum their products with `y`."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    inside = column < width
    length = tl.load(factor + column, mask=inside, other=0.0)
    total = tl.zeros((columns,), dtype=tl.float32)
    first = tl.program_id(1).to(tl.int64) * rows
    for row in range(rows):
        offsets = (first + row) * width + column
        inside_rows = inside & (first + row < num_rows)
        slope = tl.load(grad + offsets, mask=inside_rows, other=0.0).to(tl.float32)
        total += slope * tl.load(y + offsets, mask=inside_rows, other=0.0).to(tl.float32)
        tl.store(scaled + offsets, (slope * length).to(scaled.dtype.element_ty), mask=inside_rows)
    tl.store(sums + tl.program_id(1).to(tl.int64) * width + column, total, mask=inside)


@triton.jit
def drop(
    out, x, row_keys,
    row_tokens, first, offset, features, groups, linear, threshold,
    add: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Drop from some groups of features of one token: `rows.dropout` says by which draws. first:
    number of the first token in the micro-batch; offset: position of a row's first token."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * size + tl.arange(0, size)
    none = tl.zeros((size,), dtype=tl.int32)
    key = tl.load(row_keys + (token + first) // row_tokens)
    position = none + ((token + first) % row_tokens + offset).to(tl.int32)
    # 7: `rows.dropout.ROUNDS`
    one, two, three, four = tl.philox(key, group, position, none + linear, none, 7)
    start = token * features
    _drop_some(out, x, start, 0, group, groups, features, one & 0xFFFF, threshold, add)
    _drop_some(out, x, start, 1, group, groups, features, one >> 16, threshold, add)
    _drop_some(out, x, start, 2, group, groups, features, two & 0xFFFF, threshold, add)
    _drop_some(out, x, start, 3, group, groups, features, two >> 16, threshold, add)
    _drop_some(out, x, start, 4, group, groups, features, three & 0xFFFF, threshold, add)
    _drop_some(out, x, start, 5, group, groups, features, three >> 16, threshold, add)
    _drop_some(out, x, start, 6, group, groups, features, four & 0xFFFF, threshold, add)
    _drop_some(out, x, start, 7, group, groups, features, four >> 16, threshold, add)


@triton.jit
def _drop_some(
    out, x, start, eighth: tl.constexpr, group, groups, features, draws, threshold,
    add: tl.constexpr,
):  # fmt: skip
    """Drop from an eighth of a token's features, one of each group."""
    feature = eighth * groups + group
    inside = (group < groups) & (feature < features)
    value = tl.load(x + start + feature, mask=inside, other=0.0)
    value = tl.where(draws.to(tl.int32) >= threshold, value, 0.0).to(tl.float32)
    if add:
        value += tl.load(out + start + feature, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + feature, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def apply_rotary(
    out, x, cos, sin,
    angles, angle_distance, angle_step, num_heads, head_dim, x_distance, out_distance,
    back: tl.constexpr, pairs: tl.constexpr, neighbours: tl.constexpr, heads: tl.constexpr,
    width: tl.constexpr, unrotated: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 * `pairs` dimensions of all heads of one token, which share its cosines
    and sines; the rest is copied. Angles repeat after `angles` tokens. Tokens begin `x_distance`
    and `out_distance` elements apart, their angles `angle_distance`, and one pair's angle is
    `angle_step` after the one before.

    neighbours: dimensions 2 i and 2 i + 1 are a pair, else i and i + pairs. heads, width,
    unrotated: `num_heads`, `pairs` and the copied dimensions, rounded up to powers of two, as
    `tl.arange` needs."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, heads), tl.arange(0, width)
    angle = (token % angles) * angle_distance + column * angle_step
    inside = column < pairs
    cosine = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    if back:
        sine = -sine
    x_starts = token * x_distance + head[:, None] * head_dim
    out_starts = token * out_distance + head[:, None] * head_dim
    inside_heads = head[:, None] < num_heads
    inside = inside_heads & inside[None, :]
    step: tl.constexpr = 2 if neighbours else 1
    distance: tl.constexpr = 1 if neighbours else pairs
    x_at, out_at = x_starts + column[None, :] * step, out_starts + column[None, :] * step
    first = tl.load(x + x_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + x_at + distance, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + out_at, (first * cosine - second * sine).to(dtype), mask=inside)
    tl.store(out + out_at + distance, (second * cosine + first * sine).to(dtype), mask=inside)
    if unrotated > 0:
        column = 2 * pairs + tl.arange(0, unrotated)
        inside = inside_heads & (column < head_dim)[None, :]
        value = tl.load(x + x_starts + column[None, :], mask=inside, other=0.0)
        tl.store(out + out_starts + column[None, :], value, mask=inside)
