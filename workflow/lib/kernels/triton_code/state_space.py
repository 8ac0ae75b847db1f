# mypy: ignore-errors
"""GPU kernels of the selective state space of Mamba 2, in Triton; `recurrences` has what they
compute.

Of a chunk of a head, with inputs X, steps d, B and C of the head's group, sums s of the log decays
a d, and the state H before the chunk, which is the S of `state_space` transposed:

    D_ij = exp(s_i - s_j) for i >= j, else 0        A = (C B^T) D
    output = A (d X) + exp(s) (C H) + skip X
    next H = exp(s_last) H + (exp(s_last - s) d B)^T X

With the gradient O of the output and the gradient E of the next H:

    E before = exp(s_last) E + (exp(s) C)^T O
    of d X = A^T O + exp(s_last - s) (B E)          G_ij = (o_i x_j) D_ij d_j
    of C = G B + exp(s) (O H^T)                     of B = G^T C + exp(s_last - s) d (X E^T)

The last two are sums over the heads of a group. The gradient of s has the row sums of G (C B^T)
less its column sums, and what comes through the other three exponentials.

Inputs lie in rows of tokens; s in tiles (rows, heads, chunks, 64), and states in (rows, heads,
chunks, state width, width), so that no matmul has a transposed first operand: Triton 3.6 compiled
some of those wrong. Sums are made in fp32, matmuls of values in the type of x. Offsets are int64,
as in `elementwise`."""

import triton
import triton.language as tl

from workflow.lib.kernels.triton_code.chunks import (
    CHUNK,
    chunk_place,
    decays,
    dot,
    load_state,
    load_sums,
    state_places,
    store_rows,
)


@triton.jit
def cumulate(sums, step, decay, tokens, chunks, heads):
    """s of a chunk; constant after the last token."""
    first, left, head, tile = chunk_place(tl.program_id(0), tokens, chunks, heads)
    rate = tl.load(decay + head).to(tl.float32)
    total = tl.cumsum(_steps(step, first, left, heads, head) * rate, 0)
    tl.store(sums + tile * CHUNK + tl.arange(0, CHUNK), total)


@triton.jit
def chunk_states(
    states, x, step, factors, sums,
    tokens, chunks, heads, share, x_token, x_head, factors_token, factors_head,
    width: tl.constexpr, state_width: tl.constexpr, columns: tl.constexpr,
    state_columns: tl.constexpr, back: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """A chunk's addition to the state; a program has `state_columns` rows and `columns` columns.
    factors: B. back: the addition to the gradient of the state before it; then x is the gradient of
    the output and `factors` C."""
    kind: tl.constexpr = x.dtype.element_ty
    parts: tl.constexpr = (width + columns - 1) // columns
    state_parts: tl.constexpr = (state_width + state_columns - 1) // state_columns
    column = tl.program_id(0) % parts * columns
    state_column = tl.program_id(0) // parts % state_parts * state_columns
    number = tl.program_id(0) // (parts * state_parts)
    first, left, head, tile = chunk_place(number, tokens, chunks, heads)
    total, last = load_sums(sums, tile)
    if back:
        weight = tl.exp(total)
    else:
        weight = tl.exp(last - total) * _steps(step, first, left, heads, head)
    at = first * factors_token + head // share * factors_head
    left_side = _columns(
        factors, at, factors_token, left, state_column, state_width, state_columns
    ).to(tl.float32)
    at = first * x_token + head * x_head
    right_side = _rows(x, at, x_token, left, column, width, columns)
    added = dot(left_side * weight[None, :], right_side, kind, precision)
    offsets, inside = state_places(state_column, column, state_width, width, state_columns, columns)
    at = tile * state_width * width
    tl.store(states + at + offsets, added.to(states.dtype.element_ty), mask=inside)


@triton.jit
def pass_states(
    states, sums, chunks, elements: tl.constexpr, size: tl.constexpr, back: tl.constexpr
):
    """In place, for `size` of a head's state's `elements`: turn the additions of chunks into the
    state before each, or `back`, the gradient of the state after each."""
    parts: tl.constexpr = (elements + size - 1) // size
    lane = (tl.program_id(0) // parts).to(tl.int64)
    state_offset = tl.program_id(0) % parts * size + tl.arange(0, size)
    inside = state_offset < elements
    state = tl.zeros([size], tl.float32)
    tile = lane * chunks
    if back:
        tile += chunks - 1
    added = tl.load(states + tile * elements + state_offset, mask=inside, other=0.0)
    last = tl.load(sums + tile * CHUNK + CHUNK - 1)
    for done in range(chunks):
        following = tile + 1
        if back:
            following = tile - 1
        # The next chunk is read before this one is used: programs wait for memory alone.
        more = done + 1 < chunks
        at = states + following * elements + state_offset
        next_added = tl.load(at, mask=inside & more, other=0.0)
        next_last = tl.load(sums + following * CHUNK + CHUNK - 1, mask=more, other=0.0)
        tl.store(
            states + tile * elements + state_offset, state.to(states.dtype.element_ty), mask=inside
        )
        state = state * tl.exp(last) + added.to(tl.float32)
        added, last, tile = next_added, next_last, following


@triton.jit
def output(
    out, x, step, into, out_of, skip, states, sums,
    tokens, chunks, heads, share, x_token, x_head, into_token, into_head, out_of_token, out_of_head,
    width: tl.constexpr, state_width: tl.constexpr, columns: tl.constexpr,
    state_columns: tl.constexpr, skips: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """`columns` of a chunk's output; `state_columns` of B and C at a time."""
    kind: tl.constexpr = x.dtype.element_ty
    parts: tl.constexpr = (width + columns - 1) // columns
    column = tl.program_id(0) % parts * columns
    first, left, head, tile = chunk_place(tl.program_id(0) // parts, tokens, chunks, heads)
    into_at = first * into_token + head // share * into_head
    out_of_at = first * out_of_token + head // share * out_of_head
    within = tl.zeros([CHUNK, CHUNK], tl.float32)
    result = tl.zeros([CHUNK, columns], tl.float32)
    for start in range(0, state_width, state_columns):
        b = _rows(into, into_at, into_token, left, start, state_width, state_columns)
        c = _rows(out_of, out_of_at, out_of_token, left, start, state_width, state_columns)
        state = load_state(states, tile, start, column, state_width, width, state_columns, columns)
        within += dot(c, tl.trans(b), kind, precision)
        result += dot(c, state, kind, precision)
    total, _ = load_sums(sums, tile)
    within *= decays(total) * _steps(step, first, left, heads, head)[None, :]
    value = _rows(x, first * x_token + head * x_head, x_token, left, column, width, columns)
    result *= tl.exp(total)[:, None]
    result += dot(within, value, kind, precision)
    if skips:
        result += value.to(tl.float32) * tl.load(skip + head).to(tl.float32)
    at = (first * heads + head) * width
    store_rows(out, result, at, heads * width, left, column, width, columns)


@triton.jit
def inputs_backward(
    grad_x, grad_step, grad, x, step, decay, into, out_of, skip, states, grad_states, sums,
    tokens, chunks, heads, share, grad_token, grad_head, x_token, x_head, into_token, into_head,
    out_of_token, out_of_head,
    width: tl.constexpr, state_width: tl.constexpr, columns: tl.constexpr,
    state_columns: tl.constexpr, skips: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's inputs and steps, by `columns` and `state_columns` at a time."""
    kind: tl.constexpr = x.dtype.element_ty
    first, left, head, tile = chunk_place(tl.program_id(0), tokens, chunks, heads)
    token = tl.arange(0, CHUNK)
    into_at = first * into_token + head // share * into_head
    out_of_at = first * out_of_token + head // share * out_of_head
    within = tl.zeros([CHUNK, CHUNK], tl.float32)  # A^T
    for start in range(0, state_width, state_columns):
        b = _rows(into, into_at, into_token, left, start, state_width, state_columns)
        c = _rows(out_of, out_of_at, out_of_token, left, start, state_width, state_columns)
        within += dot(b, tl.trans(c), kind, precision)
    total, last = load_sums(sums, tile)
    since, until = tl.exp(total), tl.exp(last - total)
    steps = _steps(step, first, left, heads, head)
    within *= _decays_back(total)
    products = tl.zeros([CHUNK, CHUNK], tl.float32)  # X O^T
    grad_steps = tl.zeros([CHUNK], tl.float32)
    reading = tl.zeros([CHUNK], tl.float32)
    ending = tl.zeros([CHUNK], tl.float32)
    carried = tl.zeros([state_columns], tl.float32)
    grad_at, x_at = first * grad_token + head * grad_head, first * x_token + head * x_head
    for column in range(0, width, columns):
        grad_given = tl.zeros([CHUNK, columns], tl.float32)
        read = tl.zeros([CHUNK, columns], tl.float32)
        for start in range(0, state_width, state_columns):
            b = _rows(into, into_at, into_token, left, start, state_width, state_columns)
            c = _rows(out_of, out_of_at, out_of_token, left, start, state_width, state_columns)
            state = load_state(
                states, tile, start, column, state_width, width, state_columns, columns
            )
            grad_state = load_state(
                grad_states, tile, start, column, state_width, width, state_columns, columns
            )
            grad_given += dot(b, grad_state, kind, precision)
            read += dot(c, state, kind, precision)
            carried += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
        grad_out = _rows(grad, grad_at, grad_token, left, column, width, columns)
        value = _rows(x, x_at, x_token, left, column, width, columns)
        reading += tl.sum(read * grad_out.to(tl.float32), 1)
        grad_given *= until[:, None]
        ending += tl.sum(grad_given * value.to(tl.float32), 1)
        grad_given += dot(within, grad_out, kind, precision)
        grad_steps += tl.sum(grad_given * value.to(tl.float32), 1)
        products += dot(value, tl.trans(grad_out), kind, precision)
        grad_given *= steps[:, None]
        if skips:
            grad_given += grad_out.to(tl.float32) * tl.load(skip + head).to(tl.float32)
        at = (first * heads + head) * width
        store_rows(grad_x, grad_given, at, heads * width, left, column, width, columns)
    products *= within * steps[:, None]
    ending *= steps
    grad_sums = tl.sum(products, 0) - tl.sum(products, 1) + reading * since - ending
    grad_last = tl.sum(ending, 0) + tl.exp(last) * tl.sum(carried, 0)
    grad_sums += tl.where(token == CHUNK - 1, grad_last, 0.0)
    rate = tl.load(decay + head).to(tl.float32)
    grad_steps += tl.cumsum(grad_sums, 0, reverse=True) * rate
    tl.store(grad_step + (first + token) * heads + head, grad_steps, mask=token < left)


@triton.jit
def shared_backward(
    grad_into, grad_out_of, grad, x, step, into, out_of, states, grad_states, sums,
    tokens, chunks, heads, share, portions, portion, grad_token, grad_head, x_token, x_head,
    into_token, into_head, out_of_token, out_of_head,
    width: tl.constexpr, state_width: tl.constexpr, columns: tl.constexpr,
    state_columns: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Contribution of a portion of a group's heads, `portion` of them, to the gradients of a
    chunk's B and C, in `state_columns`: (rows, tokens, groups, portions, state width)."""
    kind: tl.constexpr = x.dtype.element_ty
    parts: tl.constexpr = (state_width + state_columns - 1) // state_columns
    state_column = tl.program_id(0) % parts * state_columns
    lanes = heads // share * portions
    # Heads have their own tiles; a lane gives only the chunk, by its place in `lanes`.
    first, left, lane, lane_tile = chunk_place(tl.program_id(0) // parts, tokens, chunks, lanes)
    chunk, row = lane_tile % chunks, lane_tile // chunks // lanes
    group = lane // portions
    begin = group * share + lane % portions * portion
    end = tl.minimum(begin + portion, (group + 1) * share)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)  # G
    grad_c = tl.zeros([CHUNK, state_columns], tl.float32)
    grad_b = tl.zeros([state_columns, CHUNK], tl.float32)  # transposed
    for head in range(begin, end):
        tile = (row * heads + head) * chunks + chunk
        grad_at, x_at = first * grad_token + head * grad_head, first * x_token + head * x_head
        products = tl.zeros([CHUNK, CHUNK], tl.float32)
        read = tl.zeros([CHUNK, state_columns], tl.float32)
        written = tl.zeros([state_columns, CHUNK], tl.float32)
        for column in range(0, width, columns):
            grad_out = _rows(grad, grad_at, grad_token, left, column, width, columns)
            value = _rows(x, x_at, x_token, left, column, width, columns)
            state = load_state(
                states, tile, state_column, column, state_width, width, state_columns, columns
            )
            grad_state = load_state(
                grad_states, tile, state_column, column, state_width, width, state_columns, columns
            )
            products += dot(grad_out, tl.trans(value), kind, precision)
            read += dot(grad_out, tl.trans(state), kind, precision)
            written += dot(grad_state, tl.trans(value), kind, precision)
        total, last = load_sums(sums, tile)
        steps = _steps(step, first, left, heads, head)
        scores += products * decays(total) * steps[None, :]
        grad_c += read * tl.exp(total)[:, None]
        grad_b += written * (tl.exp(last - total) * steps)[None, :]
    at = first * into_token + group * into_head
    b = _rows(into, at, into_token, left, state_column, state_width, state_columns)
    grad_c += dot(scores, b, kind, precision)
    at = first * out_of_token + group * out_of_head
    c = _columns(out_of, at, out_of_token, left, state_column, state_width, state_columns)
    grad_b += dot(c, scores, kind, precision)
    at, stride = (first * lanes + lane) * state_width, lanes * state_width
    store_rows(grad_out_of, grad_c, at, stride, left, state_column, state_width, state_columns)
    _store_columns(grad_into, grad_b, at, stride, left, state_column, state_width, state_columns)


@triton.jit
def _steps(step, first, left, heads, head):
    """Return d of a chunk, 0 after the last token."""
    token = tl.arange(0, CHUNK)
    return tl.load(step + (first + token) * heads + head, mask=token < left, other=0.0)


@triton.jit
def _decays_back(total):
    """Return D^T."""
    token = tl.arange(0, CHUNK)
    between = total[None, :] - total[:, None]
    return tl.exp(tl.where(token[None, :] >= token[:, None], between, float("-inf")))


@triton.jit
def _rows(x, at, stride, left, start, width, size: tl.constexpr):
    """Return 64 rows from offset `at`, or the `left` ones, in `size` columns from `start`."""
    row, column = tl.arange(0, CHUNK), start + tl.arange(0, size)
    inside = (row < left)[:, None] & (column < width)[None, :]
    return tl.load(x + at + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _columns(x, at, stride, left, start, width, size: tl.constexpr):
    """Return such rows transposed, (size, 64)."""
    row, column = tl.arange(0, CHUNK), start + tl.arange(0, size)
    inside = (column < width)[:, None] & (row < left)[None, :]
    return tl.load(x + at + column[:, None] + row[None, :] * stride, mask=inside, other=0.0)


@triton.jit
def _store_columns(x, value, at, stride, left, start, width, size: tl.constexpr):
    """Write such rows, given transposed."""
    row, column = tl.arange(0, CHUNK), start + tl.arange(0, size)
    inside = (column < width)[:, None] & (row < left)[None, :]
    offsets = column[:, None] + row[None, :] * stride
    tl.store(x + at + offsets, value.to(x.dtype.element_ty), mask=inside)
