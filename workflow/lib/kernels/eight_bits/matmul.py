"""Matmuls of frozen NF4 weights in float8: how weights and activations are rounded, and the matmul.

A weight row n has a scale s_n = max_b |absmax_(n,b)| / L, for the format's largest value L: no code
is above 1. The forward matmul is y_tn = s_n a_t sum_k W'_nk x'_tk, with W' = W / s and x' = x / a
in float8, and a scale a for each token. Backward sums over the rows n, so s is folded into the
gradient before that is rounded: g'_tn a_t = g_tn s_n.

A GPU has kernels. A CPU computes the same values and multiplies them in fp32, which is slow: it is
for tests and trials.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from workflow.lib.kernels.eight_bits import gpu_kernels
from workflow.lib.kernels.nf4.decode import NF4Data, dequantize_nf4
from workflow.lib.system.device_types import RECORDED
from workflow.lib.system.errors import UserError

SMALLEST_SCALE = 1e-30  # of a row of zeros, in place of 0
# What cuBLAS wants of a matrix in float8.
ALIGNED = 16


class Format(NamedTuple):
    """A type of 8 bits, and how activations are rounded to it."""

    name: str
    dtype: torch.dtype
    largest: float
    block: int | None
    """Columns that share a scale, of saved activations; None: all of a token's."""


FORMATS = {"float8": Format("float8", torch.float8_e4m3fn, 448.0, None)}


class Rounded(NamedTuple):
    """Activations or gradients in 8 bits."""

    values: torch.Tensor
    """(T, width)."""
    scales: torch.Tensor
    """(T, blocks) fp32."""
    form: Format


class RoundedWeight(NamedTuple):
    """A weight in 8 bits, as one product uses it."""

    values: torch.Tensor
    """(N, K), for a product that sums over K."""
    scales: torch.Tensor | None
    """(N,) fp32; None for ones."""


def check_shape(path: str, shape: tuple[int, int], *, block_size: int, name: str) -> None:
    """Raise `UserError` if a linear (out, in) cannot be multiplied in 8 bits."""
    if shape[1] % block_size or any(size % ALIGNED for size in shape):
        raise UserError(
            f"train.matmul_dtype = {name}: {path} has the shape {shape}, and {name} needs rows of "
            f"whole blocks of {block_size} (quantize.block_size) and sizes that are multiples of "
            f"{ALIGNED}. Set train.matmul_dtype to compute_dtype."
        )


def unfilled(size: Sequence[int], form: Format, device: torch.device) -> Rounded:
    """Return a copy of rows of this size (T, width), whose values and scales are to be written."""
    num_rows, width = size
    num_blocks = 1 if form.block is None else -(-width // form.block)
    values = torch.empty((num_rows, width), dtype=form.dtype, device=device)
    scales = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    return Rounded(values, scales, form)


def rounded(
    rows: torch.Tensor,
    form: Format,
    *,
    factors: torch.Tensor | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Rounded:
    """Return rows (T, width), times `factors` (width,) fp32 of their columns, in 8 bits.

    A row or block with NaN or infinity has the scale infinity: products with it are not finite.
    into: values and scales to fill; None: new ones.
    """
    if _has_kernels(rows.device):
        made = into or unfilled(rows.shape, form, rows.device)[:2]
        gpu_kernels.round_rows(rows, factors, largest=form.largest, block=form.block, into=made)
        return Rounded(*made, form)
    exact = rows.float() if factors is None else rows.float() * factors
    blocks = exact.split(form.block or exact.shape[1], dim=1)
    infinite = {"nan": torch.inf, "posinf": torch.inf}
    largest = torch.stack([x.abs().nan_to_num(**infinite).amax(dim=1) for x in blocks], dim=1)
    scales = (largest / form.largest).clamp_min(SMALLEST_SCALE)
    scaled = [
        block * inverse[:, None]
        for block, inverse in zip(blocks, scales.reciprocal().unbind(1), strict=True)
    ]
    made = (torch.cat(scaled, dim=1).to(form.dtype), scales)
    if into is not None:
        made = (into[0].copy_(made[0]), into[1].copy_(made[1]))
    return Rounded(*made, form)


def restored(copy: Rounded, *, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows (T, width) of a copy with scales of blocks, in `dtype`: NaN where a block had
    a value that is not finite.
    """
    values, scales, form = copy
    assert form.block is not None, "rows with one scale are multiplied and never restored"
    if _has_kernels(values.device):
        return gpu_kernels.restore_rows(values, scales, dtype=dtype, block=form.block)
    widths = scales.repeat_interleave(form.block, dim=1)[:, : values.shape[1]]
    return (values.float() * widths).to(dtype)


def row_scales(data: NF4Data, shape: tuple[int, int], form: Format) -> torch.Tensor:
    """Return the scales s (out,) fp32 of the rows of an NF4 weight (out, in)."""
    if _has_kernels(data.code.device):
        return gpu_kernels.row_scales(data, shape=shape, largest=form.largest)
    largest = _block_scales(data, shape).abs().amax(dim=1)
    return (largest / form.largest).clamp_min(SMALLEST_SCALE)


def decoded(
    data: NF4Data,
    scales: torch.Tensor,
    shape: tuple[int, int],
    form: Format,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Return W' = W / s of an NF4 weight W in 8 bits, (out, in), or transposed (in, out)."""
    if _has_kernels(scales.device):
        return gpu_kernels.decode(
            data, scales, shape=shape, dtype=form.dtype, transposed=transposed
        )
    packed = data.packed.view(torch.uint8)[: shape[0] * shape[1] // 2].flatten().int()
    pairs = torch.cartesian_prod(data.code, data.code).index_select(0, packed)  # of each byte
    ratios = _block_scales(data, shape) / scales[:, None]
    values = (pairs.view(*ratios.shape, -1) * ratios[..., None]).to(form.dtype).view(shape)
    return values.t().contiguous() if transposed else values


def _block_scales(data: NF4Data, shape: tuple[int, int]) -> torch.Tensor:
    """Return the decoded scales (out, blocks of a row) fp32."""
    size = (shape[0], shape[1] // data.block_size)
    count = size[0] * size[1]
    if data.nested_absmax is None:
        return data.absmax.view(torch.float32)[:count].view(size)
    index = data.absmax.view(torch.uint8)[:count].int()
    nested = data.nested_absmax.repeat_interleave(256)[:count]  # nf4_linear.NESTED_BLOCK_SIZE
    return (data.nested_code[index] * nested + data.offset).view(size)


def product(left: Rounded, right: RoundedWeight, *, dtype: torch.dtype) -> torch.Tensor:
    """Return left (T, K) times right (N, K)^T with all scales, (T, N) in `dtype`."""
    if _has_kernels(left.values.device):
        return _scaled_product(left, right, dtype)
    y = (left.values.float() @ right.values.float().t()) * left.scales
    return (y if right.scales is None else y * right.scales).to(dtype)


def _scaled_product(left: Rounded, right: RoundedWeight, dtype: torch.dtype) -> torch.Tensor:
    """By torch's product with a scale for each row and each column. Fast accumulation: partial sums
    are rounded to 14 bits now and then, below the rounding of the operands.
    """
    columns = right.scales
    if columns is None:
        columns = torch.ones(len(right.values), dtype=torch.float32, device=right.values.device)
    multiply: Any = torch._scaled_mm
    y: torch.Tensor = multiply(
        left.values,
        right.values.t(),
        scale_a=left.scales,
        scale_b=columns[None],
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return y


def _has_kernels(device: torch.device) -> bool:
    """Whether the kernels compute on this device; raises `UserError` on a GPU that cannot build
    them.
    """
    if dequantize_nf4.works_on(device, torch.bfloat16):
        return True
    if device.type in ("cuda", RECORDED):
        raise UserError(
            "train.matmul_dtype: float8 on a GPU needs Triton, which cannot build kernels here. "
            "Install it with a C compiler, or set train.matmul_dtype to compute_dtype."
        )
    return False
