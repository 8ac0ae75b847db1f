"""GPU kernels of the loss, in Triton; `fused_logits` calls and describes them.

A logit is computed in fp32 from the head's matmul at each use, and never stored. Offsets are int64,
as in `elementwise`."""

import triton
import triton.language as tl

LEAST = tl.constexpr(-1e30)  # below any logit; unlike -inf it can be subtracted from itself


@triton.jit
def logit_sums(
    log_sums, chosen, raw_logits, columns, row_stride, vocab, scale, cap,
    capped: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of a row's logits and the logit of its column or 0; a program has a row."""
    row = tl.program_id(0).to(tl.int64)
    first = raw_logits + row * row_stride
    column_offset = tl.arange(0, size)
    largest = tl.full((size,), LEAST, tl.float32)
    total = tl.zeros((size,), tl.float32)
    for start in range(0, vocab, size):
        inside = start + column_offset < vocab
        value, _ = _logits(
            tl.load(first + start + column_offset, mask=inside, other=0.0), scale, cap, capped
        )
        value = tl.where(inside, value, LEAST)
        above = tl.maximum(largest, value)
        shares = tl.where(inside, tl.exp(value - above), 0.0)
        total = total * tl.exp(largest - above) + shares
        largest = above
    most = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - most), 0)
    tl.store(log_sums + row, most + tl.log(total))
    column = tl.load(columns + row)
    value, _ = _logits(tl.load(first + column, mask=column >= 0, other=0.0), scale, cap, capped)
    tl.store(chosen + row, tl.where(column >= 0, value, 0.0))


@triton.jit
def logits_to_slopes(
    raw_logits, log_sums, columns, row_stride, vocab, scale, cap, ignored,
    capped: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """Overwrite the head's matmul with the loss's gradient; a program has a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    column_offset = tl.program_id(1) * size + tl.arange(0, size)
    inside = column_offset < vocab
    column = tl.load(columns + row)
    at = raw_logits + row * row_stride + column_offset
    value, slope = _logits(tl.load(at, mask=inside, other=0.0), scale, cap, capped)
    grad = tl.exp(value - tl.load(log_sums + row)) - (column_offset == column).to(tl.float32)
    grad = tl.where(column == ignored, 0.0, grad * slope)
    tl.store(at, grad.to(raw_logits.dtype.element_ty), mask=inside)


@triton.jit
def _logits(raw_logits, scale, cap, capped: tl.constexpr):
    """Return the logits of a matmul, and the derivative."""
    value = raw_logits.to(tl.float32) * scale
    if capped:
        bent = 2.0 * tl.sigmoid(2.0 * value / cap) - 1.0  # tanh
        value = cap * bent
        slope = scale * (1.0 - bent * bent)
    else:
        slope = scale
    return value, slope
