"""GPU kernels of gated RMS norms, in Triton; `gated_norm` calls and describes them.

A program has whole groups in registers. Offsets are int64, as in `elementwise`."""

import triton
import triton.language as tl


@triton.jit
def gated_norm(
    out, x, gate, weight, eps, num_units, groups, width, x_row, gate_row,
    gate_first: tl.constexpr, units: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """`units` groups of rows; `out` is contiguous."""
    unit, row, column, inside = _units(num_units, groups, width, units, size)
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    opened = _silu(tl.load(gate + row * gate_row + column, mask=inside, other=0.0))
    if gate_first:
        value *= opened
    lengths = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value *= _inverse_root(value, eps, width) * lengths
    if not gate_first:
        value *= opened
    at = unit * width + tl.arange(0, size)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm_backward(
    grad_x, grad_gate, grad, x, gate, weight, eps, num_units, groups, width, x_row, gate_row,
    gate_first: tl.constexpr, units: tl.constexpr, size: tl.constexpr,
):  # fmt: skip
    """The gradients of x and of the gate, contiguous as `grad` is."""
    unit, row, column, inside = _units(num_units, groups, width, units, size)
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    opened, share = _silu(opening), tl.sigmoid(opening)
    grad_opening = share * (1 + opening * (1 - share))
    at = unit * width + tl.arange(0, size)[None, :]
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    slope *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = values * opened if gate_first else values
    inverse = _inverse_root(value, eps, width)
    normal = value * inverse
    if gate_first:
        grad_value = _value_gradient(slope, normal, inverse, width)
        grad_values, grad_gated = grad_value * opened, grad_value * values
    else:
        grad_values = _value_gradient(slope * opened, normal, inverse, width)
        grad_gated = slope * normal
    tl.store(grad_x + at, grad_values.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(
        grad_gate + at, (grad_gated * grad_opening).to(grad_gate.dtype.element_ty), mask=inside
    )


@triton.jit
def _units(num_units, groups, width, units: tl.constexpr, size: tl.constexpr):
    """Return this program's groups over all rows, their rows and columns, and a mask."""
    unit = (tl.program_id(0).to(tl.int64) * units + tl.arange(0, units))[:, None]
    column = tl.arange(0, size)[None, :]
    inside = (unit < num_units) & (column < width)
    return unit, unit // groups, unit % groups * width + column, inside


@triton.jit
def _silu(gate):
    gate = gate.to(tl.float32)
    return gate * tl.sigmoid(gate)


@triton.jit
def _inverse_root(value, eps, width):
    """Return 1 / sqrt(mean(x^2) + eps) of groups that are 0 after their end."""
    return 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / width + eps)[:, None]


@triton.jit
def _value_gradient(slope, normal, inverse, width):
    """Return the gradient of the normalized value's input, from the normal's gradient."""
    mean = tl.sum(slope * normal, 1)[:, None] / width
    return (slope - normal * mean) * inverse
