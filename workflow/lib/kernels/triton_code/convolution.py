"""GPU kernels of short convolutions, in Triton; `short_convolution` calls and describes them.

A program has a block of tokens and channels in registers, and reads one shifted block per tap, from
the cache. Offsets are int64, as in `elementwise`."""

import triton
import triton.language as tl


@triton.jit
def convolved(
    out, x, weight, bias, tokens, channels, x_row, x_token,
    taps: tl.constexpr, biased: tl.constexpr, silu: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """A block of the outputs (rows, tokens, channels), contiguous; x has the given strides."""
    row, token, channel = _block(tokens, rows, columns)
    value = _sums(
        x + row * x_row, weight, bias, token, channel, tokens, channels, x_token, taps, biased
    )
    if silu:
        value = value * tl.sigmoid(value)
    at = (row * tokens + token[:, None]) * channels + channel[None, :]
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def convolved_backward(
    grad_x, grad, x, weight, bias, tokens, channels, x_row, x_token, grad_row, grad_token,
    taps: tl.constexpr, biased: tl.constexpr, silu: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """A block of the inputs' gradients (rows, tokens, channels), contiguous."""
    row, token, channel = _block(tokens, rows, columns)
    inside_channels = (channel < channels)[None, :]
    slope = tl.zeros((rows, columns), dtype=tl.float32)
    for ahead in tl.static_range(taps):
        later = token + ahead
        inside = (later < tokens)[:, None] & inside_channels
        at = row * grad_row + later[:, None] * grad_token + channel[None, :]
        grad_sum = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if silu:
            value = _sums(
                x + row * x_row, weight, bias, later, channel, tokens, channels, x_token, taps,
                biased,
            )  # fmt: skip
            share = tl.sigmoid(value)
            grad_sum *= share * (1 + value * (1 - share))
        tap = tl.load(
            weight + channel * taps + taps - 1 - ahead, mask=channel < channels, other=0.0
        )
        slope += grad_sum * tap.to(tl.float32)[None, :]
    at = (row * tokens + token[:, None]) * channels + channel[None, :]
    inside = (token < tokens)[:, None] & inside_channels
    tl.store(grad_x + at, slope.to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def _block(tokens, rows: tl.constexpr, columns: tl.constexpr):
    """Row, tokens and channels of this program, int64."""
    blocks = tl.cdiv(tokens, rows)
    number = tl.program_id(0).to(tl.int64)
    token = (number % blocks) * rows + tl.arange(0, rows)
    channel = tl.program_id(1).to(tl.int64) * columns + tl.arange(0, columns)
    return number // blocks, token, channel


@triton.jit
def _sums(
    x, weight, bias, token, channel, tokens, channels, x_token,
    taps: tl.constexpr, biased: tl.constexpr,
):  # fmt: skip
    """Sums over the taps for these tokens of a row, fp32; the last tap is the token's own."""
    inside_channels = channel < channels
    value = tl.zeros((token.shape[0], channel.shape[0]), dtype=tl.float32)
    if biased:
        value += tl.load(bias + channel, mask=inside_channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(taps):
        at = token - (taps - 1) + tap
        inside = ((at >= 0) & (at < tokens))[:, None] & inside_channels[None, :]
        read = tl.load(x + at[:, None] * x_token + channel[None, :], mask=inside, other=0.0)
        factor = tl.load(weight + channel * taps + tap, mask=inside_channels, other=0.0)
        value += read.to(tl.float32) * factor.to(tl.float32)[None, :]
    return value
