"""GPU kernels of norms, in Triton; `norm` calls and describes them.

A program has whole rows in registers. Offsets are int64, as in `elementwise`."""

import triton
import triton.language as tl


@triton.jit
def norm(
    out, x, weight, bias,
    heads, out_token, out_head, x_token, x_head, eps, num_rows, width,
    offset: tl.constexpr, subtracts_mean: tl.constexpr, biased: tl.constexpr, rows: tl.constexpr,
    size: tl.constexpr,
):  # fmt: skip
    """`rows` rows, times `offset` + weight, plus a bias. A row is a head of a token: `x_token`
    and `x_head` are the distances of these in x."""
    row, inside, column = _rows(num_rows, width, rows, size)
    value = _deviation(
        x + _address(row, column, heads, x_token, x_head), inside, width, subtracts_mean
    )
    normal = value * _inverse_root(value, eps, width)[:, None]
    lengths = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    value = normal * lengths[None, :]
    if biased:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    value = value.to(out.dtype.element_ty)
    tl.store(out + _address(row, column, heads, out_token, out_head), value, mask=inside)


@triton.jit
def norm_backward(
    grad_x, grad, x, weight,
    heads, out_token, out_head, grad_token, grad_head, x_token, x_head, eps, num_rows, width,
    offset: tl.constexpr, subtracts_mean: tl.constexpr, rows: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """The gradient of x; rows are as for `norm`."""
    row, inside, column = _rows(num_rows, width, rows, size)
    value = _deviation(
        x + _address(row, column, heads, x_token, x_head), inside, width, subtracts_mean
    )
    inverse = _inverse_root(value, eps, width)[:, None]
    normal = value * inverse
    lengths = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    grad_address = _address(row, column, heads, grad_token, grad_head)
    slope = tl.load(grad + grad_address, mask=inside, other=0.0).to(tl.float32) * lengths[None, :]
    mean = tl.sum(slope * normal, 1) / width
    if subtracts_mean:
        slope -= (tl.sum(slope, 1) / width)[:, None]
    value = (slope - normal * mean[:, None]) * inverse
    grad_address = _address(row, column, heads, out_token, out_head)
    tl.store(grad_x + grad_address, value.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def _rows(num_rows, width, rows: tl.constexpr, size: tl.constexpr):
    """Return this program's rows, their mask, and the columns."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, size)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    return row, inside, column


@triton.jit
def _address(row, column, heads, token_stride, head_stride):
    """Return the offsets of the columns of rows, which are heads of tokens."""
    return (row // heads * token_stride + row % heads * head_stride)[:, None] + column[None, :]


@triton.jit
def _deviation(x, inside, width, subtracts_mean: tl.constexpr):
    """Return rows of x in fp32, less their means if these are subtracted, 0 after their end."""
    value = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    if subtracts_mean:
        value = tl.where(inside, value - (tl.sum(value, 1) / width)[:, None], 0.0)
    return value


@triton.jit
def _inverse_root(value, eps, width):
    """Return 1 / sqrt(mean(x^2) + eps) of rows that are 0 after their end."""
    return 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / width + eps)
