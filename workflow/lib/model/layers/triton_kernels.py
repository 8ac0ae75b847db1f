"""The GPU kernels themselves, in Triton; `kernels` calls them and says what they compute."""

import triton
import triton.language as tl


@triton.jit
def dequantize(
    out, packed, absmax, nested_absmax, code, nested_code, offset, num_weights,
    block_size: tl.constexpr, double_quant: tl.constexpr, num_blocks: tl.constexpr,
):  # fmt: skip
    """Decode `num_blocks` blocks of weights: two weights a byte, the first in the high half."""
    packed = packed.to(tl.pointer_type(tl.uint8), bitcast=True)
    half: tl.constexpr = block_size // 2
    blocks = tl.program_id(0).to(tl.int64) * num_blocks + tl.arange(0, num_blocks)
    inside = blocks * block_size < num_weights
    if double_quant:
        scales = absmax.to(tl.pointer_type(tl.uint8), bitcast=True)
        index = tl.load(scales + blocks, mask=inside, other=0).to(tl.int32)
        nested = tl.load(nested_absmax + blocks // 256, mask=inside, other=0.0)
        scale = tl.load(nested_code + index) * nested + tl.load(offset)
    else:
        scale = tl.load(absmax + blocks, mask=inside, other=0.0)
    places = blocks[:, None] * half + tl.arange(0, half)[None, :]
    pairs = tl.load(packed + places, mask=places * 2 < num_weights, other=0).to(tl.int32)
    high = tl.load(code + (pairs >> 4)) * scale[:, None]
    low = tl.load(code + (pairs & 15)) * scale[:, None]
    weights = tl.interleave(high, low)
    targets = blocks[:, None] * block_size + tl.arange(0, block_size)[None, :]
    tl.store(out + targets, weights.to(out.dtype.element_ty), mask=targets < num_weights)


@triton.jit
def _activate(gate, kind: tl.constexpr):
    """Return act(gate) and its derivative, fp32."""
    if kind == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    # gelu(x) = x sigmoid(2 u(x)) for the u of its approximation by tanh
    doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    share, rest = 1.0 / (1.0 + tl.exp(-doubled)), 1.0 / (1.0 + tl.exp(doubled))
    slope = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * gate * gate)
    return gate * share, share + gate * share * rest * slope


@triton.jit
def gated(product, gate, up, count, kind: tl.constexpr, size: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = places < count
    value, _ = _activate(tl.load(gate + places, mask=inside, other=0.0).to(tl.float32), kind)
    value *= tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(product + places, value.to(product.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(grad, gate, up, count, kind: tl.constexpr, size: tl.constexpr):
    """In place: `grad` becomes the product, `gate` and `up` their gradients."""
    places = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = places < count
    slope = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
    lower = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    upper = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    value, derivative = _activate(lower, kind)
    kept = grad.dtype.element_ty
    tl.store(grad + places, (value * upper).to(kept), mask=inside)
    tl.store(gate + places, (slope * upper * derivative).to(kept), mask=inside)
    tl.store(up + places, (slope * value).to(kept), mask=inside)


@triton.jit
def rotate(
    out, x, cos, sin, angles, num_heads,
    back: tl.constexpr, half: tl.constexpr, heads: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Turn all heads of one token; `angles` tokens have a cosine and sine of their own, then they
    come again.
    """
    token = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, heads), tl.arange(0, width)
    turn = (token % angles) * 2 * half + place
    inside = place < half
    cosine = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
    if back:
        sine = -sine
    places = (token * num_heads + head[:, None]) * 2 * half + place[None, :]
    inside = (head[:, None] < num_heads) & inside[None, :]
    first = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + places + half, mask=inside, other=0.0).to(tl.float32)
    kept = out.dtype.element_ty
    tl.store(out + places, (first * cosine - second * sine).to(kept), mask=inside)
    tl.store(out + places + half, (second * cosine + first * sine).to(kept), mask=inside)
