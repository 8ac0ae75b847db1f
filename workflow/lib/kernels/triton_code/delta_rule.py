# mypy: ignore-errors
"""GPU kernels of the gated delta rule, in Triton; `gated_delta_rule` calls them and says what they
compute.

A program has one chunk of one head, or goes through the chunks of some value columns of a head. Of
a chunk, with sums of log decays s, keys K, queries Q, values V and learning rates b:

    D_ij = exp(s_i - s_j) for i >= j, else 0        S_ij = b_i (k_i k_j) D_ij for i > j, else 0
    T = (I + S)^-1       u = T (b V)       w = T (b exp(s) K)       A = (Q K^T) D
    new = u - w H        output = exp(s) Q H + A new
    next H = exp(s_last) H + (exp(s_last - s) K)^T new

Inputs lie in rows of tokens; what is between the kernels, in tiles: (rows, heads, chunks, 64,
width), and states in (rows, heads, chunks, key width, value width). A tile behind the last token is
zero. Sums are made in fp32, matmuls of values in the type of u. Offsets are int64, as in
`elementwise`."""

import triton
import triton.language as tl

from workflow.lib.kernels.triton_code.chunks import (
    CHUNK,
    chunk_place,
    decays,
    dot,
    load_state,
    load_sums,
    rows_places,
    state_places,
    store_rows,
)

BLOCK = tl.constexpr(16)  # of the tokens whose system is solved row by row
BLOCKS = tl.constexpr(4)  # of a chunk


@triton.jit
def prepare(
    u, w, inverse, sums, key, value, g, beta,
    tokens, chunks, heads, share, key_token, key_head, value_token, value_head,
    key_width: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
    keeps: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """s, u and w of a chunk, and T if `keeps`, `keys` and `values` columns at a time."""
    kind: tl.constexpr = u.dtype.element_ty
    first, left, head, tile = chunk_place(tl.program_id(0), tokens, chunks, heads)
    token = tl.arange(0, CHUNK)
    scalar = (first + token) * heads + head
    log_decay = tl.load(g + scalar, mask=token < left, other=0.0).to(tl.float32)
    rate = tl.load(beta + scalar, mask=token < left, other=0.0).to(tl.float32)
    total = tl.cumsum(log_decay, 0)
    tl.store(sums + tile * CHUNK + token, total)
    keys_at = first * key_token + head // share * key_head
    system = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, key_width, keys):
        k = _rows(key, keys_at, key_token, left, start, key_width, keys)
        system += dot(k, tl.trans(k), kind, precision)
    below = token[:, None] > token[None, :]
    solved = _inverse(
        tl.where(below, system * decays(total) * rate[:, None], 0.0), precision=precision
    )
    if keeps:
        _store_tile(inverse, solved, tile, 0, CHUNK, CHUNK)
    solved *= rate[None, :]
    by_rate = solved.to(kind)
    for start in range(0, value_width, values):
        at = first * value_token + head * value_head
        v = _rows(value, at, value_token, left, start, value_width, values)
        product = dot(by_rate, v, kind, precision)
        _store_tile(u, product, tile, start, value_width, values)
    by_decay = (solved * tl.exp(total)[None, :]).to(kind)
    for start in range(0, key_width, keys):
        k = _rows(key, keys_at, key_token, left, start, key_width, keys)
        _store_tile(w, dot(by_decay, k, kind, precision), tile, start, key_width, keys)


@triton.jit
def scan(
    states, new, key, u, w, sums,
    tokens, chunks, heads, share, key_token, key_head,
    key_width: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """The state before each chunk, and `new`, in `values` columns; keys: 2^n around the width."""
    kind: tl.constexpr = u.dtype.element_ty
    parts: tl.constexpr = (value_width + values - 1) // values
    lane = tl.program_id(0) // parts
    start = tl.program_id(0) % parts * values
    head, row = lane % heads, (lane // heads).to(tl.int64)
    state = tl.zeros([keys, values], tl.float32)
    for chunk in range(chunks):
        tile = lane.to(tl.int64) * chunks + chunk
        first, left = row * tokens + chunk * CHUNK, tokens - chunk * CHUNK
        _store_state(states, state, tile, start, key_width, value_width, keys, values)
        total, last = load_sums(sums, tile)
        right = _load_tile(w, tile, 0, key_width, keys)
        added = _load_tile(u, tile, start, value_width, values).to(tl.float32)
        added -= dot(right, state, kind, precision)
        _store_tile(new, added, tile, start, value_width, values)
        keys_at = first * key_token + head // share * key_head
        k = _rows(key, keys_at, key_token, left, 0, key_width, keys)
        added *= tl.exp(last - total)[:, None]
        state = state * tl.exp(last) + dot(tl.trans(k), added, kind, precision)


@triton.jit
def output(
    out, query, key, states, new, sums,
    tokens, chunks, heads, share, query_token, query_head, key_token, key_head,
    key_width: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """`values` columns of a chunk's output; `keys` columns of queries and keys at a time."""
    kind: tl.constexpr = new.dtype.element_ty
    parts: tl.constexpr = (value_width + values - 1) // values
    first, left, head, tile = chunk_place(tl.program_id(0) // parts, tokens, chunks, heads)
    column = tl.program_id(0) % parts * values
    queries_at = first * query_token + head // share * query_head
    keys_at = first * key_token + head // share * key_head
    total, _ = load_sums(sums, tile)
    result = tl.zeros([CHUNK, values], tl.float32)
    within = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, key_width, keys):
        q = _rows(query, queries_at, query_token, left, start, key_width, keys)
        k = _rows(key, keys_at, key_token, left, start, key_width, keys)
        state = load_state(states, tile, start, column, key_width, value_width, keys, values)
        within += dot(q, tl.trans(k), kind, precision)
        result += dot(q, state, kind, precision)
    added = _load_tile(new, tile, column, value_width, values)
    result *= tl.exp(total)[:, None]
    result += dot(within * decays(total), added, kind, precision)
    at = (first * heads + head) * value_width
    store_rows(out, result, at, heads * value_width, left, column, value_width, values)


@triton.jit
def within_backward(
    grad_new, grad, query, key, sums,
    tokens, chunks, heads, share, grad_token, grad_head, query_token, query_head, key_token,
    key_head,
    key_width: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """A^T grad of a chunk: the gradient of `new` from the output of its own chunk."""
    kind: tl.constexpr = grad_new.dtype.element_ty
    first, left, head, tile = chunk_place(tl.program_id(0), tokens, chunks, heads)
    queries_at = first * query_token + head // share * query_head
    keys_at = first * key_token + head // share * key_head
    total, _ = load_sums(sums, tile)
    within = tl.zeros([CHUNK, CHUNK], tl.float32)  # transposed
    for start in range(0, key_width, keys):
        q = _rows(query, queries_at, query_token, left, start, key_width, keys)
        k = _rows(key, keys_at, key_token, left, start, key_width, keys)
        within += dot(k, tl.trans(q), kind, precision)
    within = (within * tl.trans(decays(total))).to(kind)
    grads_at = first * grad_token + head * grad_head
    for start in range(0, value_width, values):
        grad_out = _rows(grad, grads_at, grad_token, left, start, value_width, values)
        product = dot(within, grad_out, kind, precision)
        _store_tile(grad_new, product, tile, start, value_width, values)


@triton.jit
def scan_backward(
    grad_states, grad_new, grad, query, key, w, sums,
    tokens, chunks, heads, share, grad_token, grad_head, query_token, query_head, key_token,
    key_head,
    key_width: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """The gradient of the state after each chunk, and in place its contribution to that of `new`,
    in `values` columns of a head. keys: the power of two that holds the key width."""
    kind: tl.constexpr = grad_new.dtype.element_ty
    parts: tl.constexpr = (value_width + values - 1) // values
    lane = tl.program_id(0) // parts
    start = tl.program_id(0) % parts * values
    head, row = lane % heads, (lane // heads).to(tl.int64)
    grad_state = tl.zeros([keys, values], tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        tile = lane.to(tl.int64) * chunks + chunk
        first, left = row * tokens + chunk * CHUNK, tokens - chunk * CHUNK
        _store_state(grad_states, grad_state, tile, start, key_width, value_width, keys, values)
        total, last = load_sums(sums, tile)
        keys_at = first * key_token + head // share * key_head
        k = _rows(key, keys_at, key_token, left, 0, key_width, keys)
        grad_added = _load_tile(grad_new, tile, start, value_width, values).to(tl.float32)
        grad_added += dot(k, grad_state, kind, precision) * tl.exp(last - total)[:, None]
        _store_tile(grad_new, grad_added, tile, start, value_width, values)
        queries_at = first * query_token + head // share * query_head
        q = _rows(query, queries_at, query_token, left, 0, key_width, keys)
        grads_at = first * grad_token + head * grad_head
        grad_out = _rows(grad, grads_at, grad_token, left, start, value_width, values)
        grad_out = grad_out.to(tl.float32) * tl.exp(total)[:, None]
        right = _load_tile(w, tile, 0, key_width, keys)
        grad_state = grad_state * tl.exp(last) + dot(tl.trans(q), grad_out, kind, precision)
        grad_state += dot(tl.trans(right), -grad_added, kind, precision)


@triton.jit
def chunk_backward(
    grad_query, grad_key, grad_right, partial, grad, query, key, beta, new, grad_new, states,
    grad_states, inverse, sums,
    tokens, chunks, heads, share, grad_token, grad_head, query_token, query_head, key_token,
    key_head,
    key_width: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Gradients in `keys` columns of the queries and keys that a value head reads in a chunk: all
    of the queries', and that of the keys without the part through S. grad_right: the gradient of b
    exp(s) K, T^T (-of_new H^T). partial: these columns' contributions to the gradients of s and b,
    (tiles, 2, parts, 64)."""
    kind: tl.constexpr = new.dtype.element_ty
    parts: tl.constexpr = (key_width + keys - 1) // keys
    part, token = tl.program_id(0) % parts, tl.arange(0, CHUNK)
    column = part * keys
    first, left, head, tile = chunk_place(tl.program_id(0) // parts, tokens, chunks, heads)
    grad_within = tl.zeros([CHUNK, CHUNK], tl.float32)
    from_state = tl.zeros([CHUNK, keys], tl.float32)
    to_state = tl.zeros([CHUNK, keys], tl.float32)
    grad_w = tl.zeros([CHUNK, keys], tl.float32)
    carried = tl.zeros([keys], tl.float32)
    grads_at = first * grad_token + head * grad_head
    for start in range(0, value_width, values):
        grad_out = _rows(grad, grads_at, grad_token, left, start, value_width, values)
        added = _load_tile(new, tile, start, value_width, values)
        grad_added = _load_tile(grad_new, tile, start, value_width, values)
        state = load_state(states, tile, column, start, key_width, value_width, keys, values)
        grad_state = load_state(
            grad_states, tile, column, start, key_width, value_width, keys, values
        )
        grad_within += dot(grad_out, tl.trans(added), kind, precision)
        from_state += dot(grad_out, tl.trans(state), kind, precision)
        to_state += dot(added, tl.trans(grad_state), kind, precision)
        grad_w += dot(grad_added, tl.trans(state), kind, precision)
        carried += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
    total, last = load_sums(sums, tile)
    since = tl.exp(total)
    rate = tl.load(beta + (first + token) * heads + head, mask=token < left, other=0.0)
    rate = rate.to(tl.float32)
    solved = _load_tile(inverse, tile, 0, CHUNK, CHUNK)
    grad_r = dot(tl.trans(solved), -grad_w, kind, precision)
    _store_tile(grad_right, grad_r, tile, column, key_width, keys)
    grad_r *= since[:, None]
    from_state *= since[:, None]
    to_state *= tl.exp(last - total)[:, None]

    at = first * query_token + head // share * query_head
    q = _rows(query, at, query_token, left, column, key_width, keys)
    at = first * key_token + head // share * key_head
    k = _rows(key, at, key_token, left, column, key_width, keys)
    grad_scores = grad_within * decays(total)
    grad_q = from_state + dot(grad_scores, k, kind, precision)
    at, stride = (first * heads + head) * key_width, heads * key_width
    store_rows(grad_query, grad_q, at, stride, left, column, key_width, keys)
    grad_k = to_state + grad_r * rate[:, None] + dot(tl.trans(grad_scores), q, kind, precision)
    store_rows(grad_key, grad_k, at, stride, left, column, key_width, keys)

    grad_scores *= dot(q, tl.trans(k), kind, precision)
    grad_rate = tl.sum(grad_r * k.to(tl.float32), 1)
    ending = tl.sum(to_state * k.to(tl.float32), 1)
    grad_sums = tl.sum(grad_scores, 1) - tl.sum(grad_scores, 0) - ending
    grad_sums += tl.sum(from_state * q.to(tl.float32), 1) + grad_rate * rate
    grad_last = tl.sum(ending, 0) + tl.exp(last) * tl.sum(carried, 0)
    grad_sums += tl.where(token == CHUNK - 1, grad_last, 0.0)
    partial_at = (tile * 2 * parts + part) * CHUNK + token
    tl.store(partial + partial_at, grad_sums)
    tl.store(partial + partial_at + parts * CHUNK, grad_rate)


@triton.jit
def system_backward(
    grad_key, grad_value, grad_g, grad_beta, grad_right, partial, key, value, beta, u, w, grad_new,
    inverse, sums,
    tokens, chunks, heads, share, key_token, key_head, value_token, value_head,
    key_width: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
    parts: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's values, log decays and learning rates, and in place the missing part
    through S of its keys' for one value head. parts: of `partial`."""
    kind: tl.constexpr = u.dtype.element_ty
    first, left, head, tile = chunk_place(tl.program_id(0), tokens, chunks, heads)
    token = tl.arange(0, CHUNK)
    scalar = (first + token) * heads + head
    rate = tl.load(beta + scalar, mask=token < left, other=0.0).to(tl.float32)
    solved = tl.trans(_load_tile(inverse, tile, 0, CHUNK, CHUNK)).to(kind)
    grad_rate = tl.zeros([CHUNK], tl.float32)
    grad_system = tl.zeros([CHUNK, CHUNK], tl.float32)
    values_at, grad_values_at = first * value_token + head * value_head, first * heads + head
    for start in range(0, value_width, values):
        grad_added = _load_tile(grad_new, tile, start, value_width, values)
        grad_v = dot(solved, grad_added, kind, precision)
        new = _load_tile(u, tile, start, value_width, values)
        grad_system += dot(grad_v, tl.trans(new), kind, precision)
        v = _rows(value, values_at, value_token, left, start, value_width, values)
        grad_rate += tl.sum(grad_v * v.to(tl.float32), 1)
        at, stride = grad_values_at * value_width, heads * value_width
        grad_v *= rate[:, None]
        store_rows(grad_value, grad_v, at, stride, left, start, value_width, values)
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    keys_at = first * key_token + head // share * key_head
    for start in range(0, key_width, keys):
        grad_r = _load_tile(grad_right, tile, start, key_width, keys)
        right = _load_tile(w, tile, start, key_width, keys)
        k = _rows(key, keys_at, key_token, left, start, key_width, keys)
        grad_system += dot(grad_r, tl.trans(right), kind, precision)
        products += dot(k, tl.trans(k), kind, precision)
    total, _ = load_sums(sums, tile)
    below = token[:, None] > token[None, :]
    grad_system = tl.where(below, -grad_system * decays(total), 0.0)
    products *= grad_system
    grad_rate += tl.sum(products, 1)
    products *= rate[:, None]
    grad_sums = tl.sum(products, 1) - tl.sum(products, 0)
    for part in range(parts):
        partial_at = (tile * 2 * parts + part) * CHUNK + token
        grad_sums += tl.load(partial + partial_at)
        grad_rate += tl.load(partial + partial_at + parts * CHUNK)
    grad_sums = tl.cumsum(grad_sums, 0, reverse=True)
    tl.store(grad_g + scalar, grad_sums.to(grad_g.dtype.element_ty), mask=token < left)
    tl.store(grad_beta + scalar, grad_rate.to(grad_beta.dtype.element_ty), mask=token < left)

    grad_system *= rate[:, None]
    grad_products = (grad_system + tl.trans(grad_system)).to(kind)
    grad_keys_at, stride = (first * heads + head) * key_width, heads * key_width
    for start in range(0, key_width, keys):
        k = _rows(key, keys_at, key_token, left, start, key_width, keys)
        grad_k = _rows(grad_key, grad_keys_at, stride, left, start, key_width, keys).to(tl.float32)
        grad_k += dot(grad_products, k, kind, precision)
        store_rows(grad_key, grad_k, grad_keys_at, stride, left, start, key_width, keys)


@triton.jit
def _inverse(system, precision: tl.constexpr):
    """Return (I + system)^-1 of a matrix that is strictly lower triangular, (64, 64) fp32. The
    diagonal blocks of 16 are solved row by row. With their inverse B, and M = B times the blocks
    below them, M^4 = 0, so that (I + M)^-1 B = (I + M^2) (I - M) B."""
    block = tl.arange(0, BLOCKS)
    own = (block[:, None] == block[None, :])[:, None, :, None]
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    blocks = tl.reshape(system, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    lower = tl.sum(tl.where(own, blocks, 0.0), 2)
    solved = tl.zeros([BLOCKS, BLOCK, BLOCK], tl.float32) + tl.where(row == column, 1.0, 0.0)
    for i in range(BLOCK - 1):
        factors = tl.sum(tl.where(column == i, lower, 0.0), 2)
        line = tl.sum(tl.where(row == i, solved, 0.0), 1)
        solved -= factors[:, :, None] * line[:, None, :]
    solved = tl.reshape(tl.where(own, solved[:, :, None, :], 0.0), [CHUNK, CHUNK])
    off_diagonal = tl.reshape(tl.where(own, 0.0, blocks), [CHUNK, CHUNK])
    step = tl.dot(solved, off_diagonal, input_precision=precision)
    solved -= tl.dot(step, solved, input_precision=precision)
    twice = tl.dot(step, step, input_precision=precision)
    return solved + tl.dot(twice, solved, input_precision=precision)


@triton.jit
def _rows(x, at, stride, left, start, width, size: tl.constexpr):
    """Return 64 rows from offset `at`, or the `left` ones, in `size` columns from `start`."""
    offsets, inside = rows_places(stride, left, start, width, size)
    return tl.load(x + at + offsets, mask=inside, other=0.0)


@triton.jit
def _load_tile(x, tile, start, width: tl.constexpr, size: tl.constexpr):
    """Return `size` columns of a tile from `start`."""
    return _rows(x, tile * CHUNK * width, width, CHUNK, start, width, size)


@triton.jit
def _store_tile(x, value, tile, start, width: tl.constexpr, size: tl.constexpr):
    """Write them."""
    store_rows(x, value, tile * CHUNK * width, width, CHUNK, start, width, size)


@triton.jit
def _store_state(
    x, state, tile, value_start,
    key_width: tl.constexpr, value_width: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
):  # fmt: skip
    """Write all rows and `values` columns of it."""
    offsets, inside = state_places(0, value_start, key_width, value_width, keys, values)
    at = tile * key_width * value_width
    tl.store(x + at + offsets, state.to(x.dtype.element_ty), mask=inside)
