"""Products of frozen NF4 weights in 8 bits: which formats there are, how weights and activations
are rounded to them, and the product.

A weight row n has a scale s_n = max_b |absmax_(n,b)| / L, for the format's largest value L: no code
is above 1. The forward product is y_tn = s_n sum_k W'_nk sum over blocks of x'_tk a_t,block, with
W' = W / s and x' = x / a in 8 bits. Backward sums over the rows n, so s is folded into the
gradient before that is rounded: g'_tn a_t,block = g_tn s_n.

float8 has a scale a for a token. int8 has one for a token and each 128 columns, because a few
columns of activations are many times larger than others: with one scale for a token they round all
others away (docs/numerics.md has the losses).

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
# What cuBLAS and CUTLASS want of a matrix in 8 bits.
ALIGNED = 16


class Format(NamedTuple):
    """A type of 8 bits, and how activations are rounded to it."""

    name: str
    dtype: torch.dtype
    largest: float
    block: int | None
    """Columns of activations and gradients that share a scale; None: all of a token's."""

    @property
    def adds(self) -> bool:
        """Whether its product can add to what is there: ours can, torch's cannot."""
        return self.block is not None


FORMATS = {
    "float8": Format("float8", torch.float8_e4m3fn, 448.0, None),
    "int8": Format("int8", torch.int8, 127.0, 128),
}


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
            f"train.products = {name}: {path} has the shape {shape}, and 8 bits need rows of whole "
            f"blocks of {block_size} (quantize.block_size) and sizes that are multiples of "
            f"{ALIGNED}. Set train.products to compute_dtype."
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
    made = (_nearest(torch.cat(scaled, dim=1), form), scales)
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
    values = _nearest(pairs.view(*ratios.shape, -1) * ratios[..., None], form).view(shape)
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


def _nearest(values: torch.Tensor, form: Format) -> torch.Tensor:
    """Round fp32 values of at most `form.largest` as the kernels do."""
    if form.dtype == torch.int8:
        return (values + 0.5).floor().nan_to_num(0.0).to(torch.int8)
    return values.to(form.dtype)


def product(left: Rounded, right: RoundedWeight, *, dtype: torch.dtype) -> torch.Tensor:
    """Return left (T, K) times right (N, K)^T with all scales, (T, N) in `dtype`."""
    values, form = left.values, left.form
    if not _has_kernels(values.device):
        return _emulated(left, right).to(dtype)
    if form.block is None:
        return _scaled_product(left, right, dtype)
    y = torch.empty((len(values), len(right.values)), dtype=dtype, device=values.device)
    return gpu_kernels.block_product(
        y, values, right.values, left.scales, right.scales, block=form.block, add=False
    )


def add_product_(total: torch.Tensor, left: Rounded, right: RoundedWeight) -> torch.Tensor:
    """Add that product to `total` (T, N); return it."""
    form = left.form
    if form.block is not None and _has_kernels(total.device):
        return gpu_kernels.block_product(
            total, left.values, right.values, left.scales, right.scales, block=form.block, add=True
        )
    return total.add_(product(left, right, dtype=total.dtype))


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


def _emulated(left: Rounded, right: RoundedWeight) -> torch.Tensor:
    """The same in fp32: sums of products of values in 8 bits, block by block."""
    width = left.values.shape[1]
    size = left.form.block or width
    parts = zip(left.values.split(size, 1), right.values.split(size, 1), strict=True)
    total = torch.zeros((), device=left.values.device)
    for (one, other), scale in zip(parts, left.scales.unbind(1), strict=True):
        total = total + (one.float() @ other.float().t()) * scale[:, None]
    return total if right.scales is None else total * right.scales


def _has_kernels(device: torch.device) -> bool:
    """Whether the kernels compute on this device; raises `UserError` on a GPU that cannot build
    them.
    """
    if dequantize_nf4.works_on(device, torch.bfloat16):
        return True
    if device.type in ("cuda", RECORDED):
        raise UserError(
            "train.products: 8 bits on a GPU need Triton, which cannot build kernels here. Install "
            "it with a C compiler, or set train.products to compute_dtype."
        )
    return False
