"""GPU kernels of RMS norms, in Triton; `norm` calls them and says what they compute.

A program has whole rows in registers. Offsets are int64, as in `triton_kernels`.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    out,
    x,
    weight,
    eps,
    num_rows,
    width,
    offset: tl.constexpr,
    rows: tl.constexpr,
    size: tl.constexpr,
):
    """`rows` rows, times `offset` + weight."""
    at, inside, column = _rows(num_rows, width, rows, size)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    normed = value * _inverse_root(value, eps, width)[:, None]
    lengths = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    tl.store(out + at, (normed * lengths[None, :]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward(
    of_x,
    grad,
    x,
    weight,
    eps,
    num_rows,
    width,
    offset: tl.constexpr,
    rows: tl.constexpr,
    size: tl.constexpr,
):
    """The gradient of x."""
    at, inside, column = _rows(num_rows, width, rows, size)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    inverse = _inverse_root(value, eps, width)[:, None]
    normed = value * inverse
    lengths = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * lengths[None, :]
    mean = tl.sum(slope * normed, 1) / width
    value = (slope - normed * mean[:, None]) * inverse
    tl.store(of_x + at, value.to(of_x.dtype.element_ty), mask=inside)


@triton.jit
def _rows(num_rows, width, rows: tl.constexpr, size: tl.constexpr):
    """Return the places of this program's rows, which of them there are, and the columns."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, size)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    return row[:, None] * width + column[None, :], inside, column


@triton.jit
def _inverse_root(value, eps, width):
    """Return 1 / sqrt(mean(x^2) + eps) of rows that are 0 behind their end."""
    return 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / width + eps)
