"""GPU kernels of attention within documents, in Triton; `attention.document_attention` calls and
describes them.

Each program has a tile of tokens with all columns of their heads, and loops over the other tokens
in smaller tiles. Scores are scaled for powers of two, and never stored. Offsets are int64, as in
`elementwise`."""

import triton
import triton.language as tl

LEAST = tl.constexpr(-1e30)  # below any score; unlike -inf it can be subtracted from itself


@triton.jit
def attention(
    out, log_sums, q, k, v, first, q_token, q_head, k_token, k_head, v_token, v_head,
    tokens, heads, group, scale,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """The output of `rows` queries of a head, and the logarithms of their sums."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last have the most keys: they begin
    head = tl.program_id(1).to(tl.int64)
    row = block * rows + tl.arange(0, rows)
    lowest = tl.load(first + row, mask=row < tokens, other=tokens)
    queries = _tile(q + head * q_head, row, q_token, tokens, dim, width)
    keys_at, values_at = head // group * k_head, head // group * v_head
    most = tl.full((rows,), LEAST, tl.float32)
    total = tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, width), tl.float32)
    begin = tl.min(lowest, 0) // columns * columns
    for start in range(begin, min((block + 1) * rows, tokens), columns):
        column = start + tl.arange(0, columns)
        keys = _tile(k + keys_at, column, k_token, tokens, dim, width)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        seen = (column[None, :] >= lowest[:, None]) & (column[None, :] <= row[:, None])
        scores = tl.where(seen, scores, LEAST)
        above = tl.maximum(most, tl.max(scores, 1))
        shares = tl.where(seen, tl.exp2(scores - above[:, None]), 0.0)
        shrink = tl.exp2(most - above)
        total = total * shrink + tl.sum(shares, 1)
        values = _tile(v + values_at, column, v_token, tokens, dim, width)
        sums = sums * shrink[:, None]
        sums = tl.dot(shares.to(values.dtype), values, sums)
        most = above
    total = tl.where(row < tokens, total, 1.0)
    tl.store(log_sums + head * tokens + row, most + tl.log2(total), mask=row < tokens)
    _store(out + head * dim, sums / total[:, None], row, heads * dim, tokens, dim, width)


@triton.jit
def attention_products(
    sums, grad, out, tokens, heads,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Of `rows` tokens and one head: the sum of the output times its gradient."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    head = tl.program_id(1).to(tl.int64)
    one = _tile(grad + head * dim, row, heads * dim, tokens, dim, width).to(tl.float32)
    other = _tile(out + head * dim, row, heads * dim, tokens, dim, width).to(tl.float32)
    tl.store(sums + head * tokens + row, tl.sum(one * other, 1), mask=row < tokens)


@triton.jit
def attention_of_queries(
    grad_q, grad, log_sums, sums, q, k, v, first, q_token, q_head, k_token, k_head, v_token, v_head,
    tokens, heads, group, scale, factor,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """The gradient of `rows` queries of a head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = block * rows + tl.arange(0, rows)
    lowest = tl.load(first + row, mask=row < tokens, other=tokens)
    log_sum = tl.load(log_sums + head * tokens + row, mask=row < tokens, other=0.0)
    product = tl.load(sums + head * tokens + row, mask=row < tokens, other=0.0)
    queries = _tile(q + head * q_head, row, q_token, tokens, dim, width)
    slopes = _tile(grad + head * dim, row, heads * dim, tokens, dim, width)
    keys_at, values_at = head // group * k_head, head // group * v_head
    total = tl.zeros((rows, width), tl.float32)
    begin = tl.min(lowest, 0) // columns * columns
    for start in range(begin, min((block + 1) * rows, tokens), columns):
        column = start + tl.arange(0, columns)
        keys = _tile(k + keys_at, column, k_token, tokens, dim, width)
        values = _tile(v + values_at, column, v_token, tokens, dim, width)
        scores = tl.dot(queries, tl.trans(keys)) * scale - log_sum[:, None]
        seen = (column[None, :] >= lowest[:, None]) & (column[None, :] <= row[:, None])
        shares = tl.where(seen, tl.exp2(scores), 0.0)
        steep = shares * (tl.dot(slopes, tl.trans(values)) - product[:, None])
        total = tl.dot(steep.to(keys.dtype), keys, total)
    _store(grad_q + head * dim, total * factor, row, heads * dim, tokens, dim, width)


@triton.jit
def attention_of_keys(
    grad_k, grad_v, grad, log_sums, sums, q, k, v, first, last,
    q_token, q_head, k_token, k_head, v_token, v_head, tokens, heads, group, scale, factor,
    dim: tl.constexpr, width: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """The gradients of `rows` keys and values, of all heads of queries that they serve."""
    own = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * rows
    row = begin + tl.arange(0, rows)
    end = tl.max(tl.load(last + row, mask=row < tokens, other=0), 0)
    keys = _tile(k + own * k_head, row, k_token, tokens, dim, width)
    values = _tile(v + own * v_head, row, v_token, tokens, dim, width)
    key_total = tl.zeros((rows, width), tl.float32)
    value_total = tl.zeros((rows, width), tl.float32)
    for head in range(own * group, (own + 1) * group):
        for start in range(begin // columns * columns, end, columns):
            column = start + tl.arange(0, columns)
            inside = column < tokens
            lowest = tl.load(first + column, mask=inside, other=tokens)
            log_sum = tl.load(log_sums + head * tokens + column, mask=inside, other=0.0)
            product = tl.load(sums + head * tokens + column, mask=inside, other=0.0)
            queries = _tile(q + head * q_head, column, q_token, tokens, dim, width)
            slopes = _tile(grad + head * dim, column, heads * dim, tokens, dim, width)
            scores = tl.dot(keys, tl.trans(queries)) * scale - log_sum[None, :]
            seen = (row[:, None] >= lowest[None, :]) & (row[:, None] <= column[None, :])
            shares = tl.where(seen, tl.exp2(scores), 0.0)
            value_total = tl.dot(shares.to(slopes.dtype), slopes, value_total)
            steep = shares * (tl.dot(values, tl.trans(slopes)) - product[None, :])
            key_total = tl.dot(steep.to(queries.dtype), queries, key_total)
    distance = heads // group * dim
    _store(grad_k + own * dim, key_total * factor, row, distance, tokens, dim, width)
    _store(grad_v + own * dim, value_total, row, distance, tokens, dim, width)


@triton.jit
def _tile(start, row, distance, tokens, dim: tl.constexpr, width: tl.constexpr):
    """Read all columns of some tokens; none is 0."""
    column = tl.arange(0, width)
    inside = (row < tokens)[:, None]
    if dim < width:
        inside = inside & (column < dim)[None, :]
    at = row.to(tl.int64)[:, None] * distance + column[None, :]
    return tl.load(start + at, mask=inside, other=0.0)


@triton.jit
def _store(start, tile, row, distance, tokens, dim: tl.constexpr, width: tl.constexpr):
    column = tl.arange(0, width)
    inside = (row < tokens)[:, None]
    if dim < width:
        inside = inside & (column < dim)[None, :]
    at = row.to(tl.int64)[:, None] * distance + column[None, :]
    tl.store(start + at, tile.to(start.dtype.element_ty), mask=inside)
