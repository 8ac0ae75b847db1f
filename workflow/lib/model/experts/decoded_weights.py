"""What a grouped product multiplies: slices of a stack in the compute type, or in float8, and the
rows to match.

In float8 an expert's weights have one scale, which brings its largest block scale to the format's
largest value. A linear has one for each row (`eight_bits.matmul`); but a float keeps its digits
whatever its size, e4m3 down to 1/28,000 of its largest value, and with one scale for an expert the
scales need not be multiplied into the gradient before that is rounded. So a token's gradient is
rounded once, not once for each of its experts.

int8 would need scales within a row: experts stay in the compute type.
"""

import torch

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.kernels.eight_bits.matmul import Format, decoded, rounded, row_scales
from workflow.lib.kernels.experts import grouped_kernels
from workflow.lib.kernels.experts.routing import Rows, Weights
from workflow.lib.model.layers.nf4_stack import NF4Stack


def form_of_experts(form: Format | None) -> Format | None:
    """Return in what experts are multiplied where linears are in `form`; None: the compute type."""
    return None if form is None or form.block is not None else form


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
    scales = _scales(base, form)
    if kernels.usable(scales.device):
        made = grouped_kernels.decode_rows(base, start, stop, scales=scales, dtype=form.dtype)
        return Weights(made, scales)
    return Weights(_whole(base, form)[:, start:stop], scales)


def column_weights(
    base: NF4Stack, start: int, stop: int, *, form: Format | None, dtype: torch.dtype
) -> Weights:
    """Return columns `start` to `stop` of every expert, transposed (experts, stop - start, out),
    for the gradient of x.
    """
    if form is None:
        return Weights(base.dequantize_columns(start, stop, dtype).transpose(1, 2))
    scales = _scales(base, form)
    if kernels.usable(scales.device):
        made = grouped_kernels.decode_columns(base, start, stop, scales=scales, dtype=form.dtype)
        return Weights(made, scales)
    return Weights(_whole(base, form)[..., start:stop].transpose(1, 2), scales)


def _scales(base: NF4Stack, form: Format) -> torch.Tensor:
    """Return the scale (experts,) fp32 of each expert, made at its first use."""
    kept = base.row_scales.get(form.name)
    if kept is None:
        kept = row_scales(base.nf4_data(), _by_expert(base), form)
        base.row_scales[form.name] = kept
    return kept


def _whole(base: NF4Stack, form: Format) -> torch.Tensor:
    """Return the stack (experts, out, in) in 8 bits, without a kernel."""
    flat = decoded(base.nf4_data(), _scales(base, form), _by_expert(base), form)
    return flat.view(base.num_experts, base.expert_rows, base.in_features)


def _by_expert(base: NF4Stack) -> tuple[int, int]:
    """Return the shape of the stack with a row for each expert."""
    return base.num_experts, base.expert_rows * base.in_features
