"""What a grouped product multiplies: slices of a stack in the compute type, or in float8, and the
rows to match.

In float8 an expert's weights have one scale, which brings its largest block scale to the format's
largest value. A linear has one for each row (`eight_bits.matmul`); but a float keeps its digits
whatever its size, e4m3 down to 1/28,000 of its largest value, and with one scale for an expert the
scales need not be multiplied into the gradient before that is rounded. So a token's gradient is
rounded once, not once for each of its experts."""

import torch

from workflow.lib.kernels.eight_bits.matmul import row_scales
from workflow.lib.kernels.eight_bits.rounding import Format, rounded
from workflow.lib.kernels.experts.float8_slices import PackedStack, decode_columns, decode_rows
from workflow.lib.kernels.experts.routing import Rows, Weights
from workflow.lib.model.layers.nf4_stack import NF4Stack


def operand(rows: Rows, form: Format | None) -> Rows:
    """Return rows as a product in `form` takes them."""
    if form is None:
        return rows
    made = rounded(rows.values, form)
    return Rows(made.values, rows.by_token, made.scales)


def row_weights(
    base: NF4Stack, start: int, stop: int, *, form: Format | None, dtype: torch.dtype
) -> Weights:
    """Return rows `start` to `stop` of every expert (experts, stop - start, in), for y."""
    if form is None:
        return Weights(base.dequantize_rows(start, stop, dtype))
    stack, scales = _packed(base, form)
    return Weights(decode_rows(stack, scales, start, stop, form.dtype), scales)


def column_weights(
    base: NF4Stack, start: int, stop: int, *, form: Format | None, dtype: torch.dtype
) -> Weights:
    """Return columns `start` to `stop` of every expert, transposed (experts, stop - start, out),
    for the gradient of x."""
    if form is None:
        return Weights(base.dequantize_columns(start, stop, dtype).transpose(1, 2))
    stack, scales = _packed(base, form)
    return Weights(decode_columns(stack, scales, start, stop, form.dtype), scales)


def _packed(base: NF4Stack, form: Format) -> tuple[PackedStack, torch.Tensor]:
    """Return what is stored, and each expert's scale (experts,) fp32, made at its first use."""
    stack = PackedStack(base.nf4_data(), base.num_experts, base.expert_rows, base.in_features)
    scales = base.row_scales.get(form.name)
    if scales is None:
        scales = row_scales(stack.data, stack.by_expert, form)
        base.row_scales[form.name] = scales
    return stack, scales
