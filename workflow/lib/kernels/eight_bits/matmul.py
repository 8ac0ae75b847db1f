"""Matmuls of frozen NF4 weights in float8: how weights and activations are rounded, and the matmul.

A weight row n has a scale s_n = max_b |absmax_(n,b)| / L, for the format's largest value L: no code
is above 1. The forward matmul is y_tn = s_n a_t sum_k W'_nk x'_tk, with W' = W / s and x' = x / a
in float8, and a scale a for each token. Backward sums over the rows n, so s is folded into the
gradient before that is rounded: g'_tn a_t = g_tn s_n.

A GPU has kernels, whose programs have the fastest of the sizes tried on an H200 for weights of
28,672 x 8,192 and 4,096 x 14,336. A CPU computes the same values and multiplies them in fp32, which
is slow: it is for tests and trials."""

from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import quantize_4bit

from workflow.lib.kernels.eight_bits.rounding import (
    FORMATS,
    SMALLEST_SCALE,
    Format,
    Rounded,
    by_kernel_on_gpus,
)
from workflow.lib.kernels.launch import WARPS, launch, power_of_two
from workflow.lib.kernels.nf4.decode import NF4Data
from workflow.lib.kernels.op import Case, Op
from workflow.lib.system.device_types import GPUS
from workflow.lib.system.errors import UserError

# What cuBLAS wants of a matrix in float8.
ALIGNED = 16
DECODED_BLOCKS = 64  # of a program
TRANSPOSED_ROWS = 128  # of a program
CASE_SHAPE = (16, 128)


class RoundedWeight(NamedTuple):
    """A weight in 8 bits, as one matmul uses it."""

    values: torch.Tensor  # (N, K), for a matmul that sums over K
    scales: torch.Tensor | None  # (N,) fp32; None for ones


def check_shape(path: str, shape: tuple[int, int], *, block_size: int, name: str) -> None:
    """Raise `UserError` if a linear (out, in) cannot be multiplied in 8 bits."""
    if shape[1] % block_size or any(size % ALIGNED for size in shape):
        raise UserError(
            f"train.matmul_dtype = {name}: {path} has the shape {shape}, and {name} needs rows of "
            f"whole blocks of {block_size} (quantize.block_size) and sizes that are multiples of "
            f"{ALIGNED}. Set train.matmul_dtype to compute_dtype."
        )


def row_scales(data: NF4Data, shape: tuple[int, int], form: Format) -> torch.Tensor:
    """Return the scales s (out,) fp32 of the rows of an NF4 weight (out, in)."""
    scales: torch.Tensor = by_kernel_on_gpus(scales_of_rows, data, shape, form.largest)
    return scales


def _scales_by_kernel(data: NF4Data, shape: tuple[int, int], largest: float) -> torch.Tensor:
    num_rows, width = shape
    scales = torch.empty(num_rows, dtype=torch.float32, device=data.code.device)
    row_blocks = width // data.block_size
    launch(
        "eight_bits.row_scales", (num_rows,), scales, *data.scale_parts, data.nested_code,
        data.offset, row_blocks, most=largest, double=data.doubly_quantized,
        size=min(512, power_of_two(row_blocks)), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return scales


def _scales_by_torch(data: NF4Data, shape: tuple[int, int], largest: float) -> torch.Tensor:
    most = _block_scales(data, shape).abs().amax(dim=1)
    return (most / largest).clamp_min(SMALLEST_SCALE)


def _case_data(device: torch.device) -> NF4Data:
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(CASE_SHAPE, generator=draw).to(device)
    made: Any = quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
    return NF4Data.of(*made)


scales_of_rows = Op(
    "scales of weights' rows",
    reference=_scales_by_torch,
    kernel=_scales_by_kernel,
    case=lambda device: (_case_data(device), CASE_SHAPE, FORMATS["float8"].largest),
    variant=lambda *_: (),
)


def decoded(
    data: NF4Data,
    scales: torch.Tensor,
    shape: tuple[int, int],
    form: Format,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Return W' = W / s of an NF4 weight W in 8 bits, (out, in), or transposed (in, out)."""
    given = (data, scales, shape, form.dtype, transposed)
    weight: torch.Tensor = by_kernel_on_gpus(decode_rounded, *given)
    return weight


def _decode_by_kernel(
    data: NF4Data,
    scales: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    transposed: bool,
) -> torch.Tensor:
    num_rows, width = shape
    row_blocks = width // data.block_size
    out = torch.empty(shape[::-1] if transposed else shape, dtype=dtype, device=scales.device)
    given = (data.packed, *data.scale_parts, data.code, data.nested_code, data.offset, scales)
    options = {
        "block_size": data.block_size,
        "double": data.doubly_quantized,
        "enable_fp_fusion": False,
    }
    if transposed:
        launch(
            "eight_bits.decode_transposed", (-(-num_rows // TRANSPOSED_ROWS), row_blocks), out,
            *given, num_rows, row_blocks, rows=TRANSPOSED_ROWS, num_warps=WARPS, **options,
        )  # fmt: skip
    else:
        launch(
            "eight_bits.decode_eight_bits", (-(-num_rows * row_blocks // DECODED_BLOCKS),), out,
            *given, num_rows, row_blocks, blocks=DECODED_BLOCKS, num_warps=WARPS // 2, **options,
        )  # fmt: skip
    return out


def _decode_by_torch(
    data: NF4Data,
    scales: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    transposed: bool,
) -> torch.Tensor:
    packed = data.packed.view(torch.uint8).flatten()[: shape[0] * shape[1] // 2].int()
    pairs = torch.cartesian_prod(data.code, data.code).index_select(0, packed)  # of each byte
    ratios = _block_scales(data, shape) / scales[:, None]
    values = (pairs.view(*ratios.shape, -1) * ratios[..., None]).to(dtype).view(shape)
    return values.t().contiguous() if transposed else values


def _case_of_weight(device: torch.device, dtype: torch.dtype, transposed: bool) -> Case:
    data = _case_data(device)
    scales = _scales_by_torch(data, CASE_SHAPE, FORMATS["float8"].largest)
    return data, scales, CASE_SHAPE, dtype, transposed


decode_rounded = Op(
    "decoding of NF4 to float8",
    reference=_decode_by_torch,
    kernel=_decode_by_kernel,
    case=_case_of_weight,
    variant=lambda *args: (args[-2], args[-1]),
)


def _block_scales(data: NF4Data, shape: tuple[int, int]) -> torch.Tensor:
    """Return the decoded scales (out, blocks of a row) fp32."""
    size = (shape[0], shape[1] // data.block_size)
    count = size[0] * size[1]
    if data.nested_absmax is None:
        return data.absmax.view(torch.float32)[:count].view(size)
    index = data.absmax.view(torch.uint8)[:count].int()
    nested = data.nested_absmax.repeat_interleave(256)[:count]  # nf4_linear.NESTED_BLOCK_SIZE
    return (data.nested_code[index] * nested + data.offset).view(size)


def eight_bit_matmul(left: Rounded, right: RoundedWeight, *, dtype: torch.dtype) -> torch.Tensor:
    """Return left (T, K) times right (N, K)^T with all scales, (T, N) in `dtype`."""
    if left.values.device.type in GPUS:
        return _scaled_mm(left, right, dtype)
    y = (left.values.float() @ right.values.float().t()) * left.scales
    return (y if right.scales is None else y * right.scales).to(dtype)


def _scaled_mm(left: Rounded, right: RoundedWeight, dtype: torch.dtype) -> torch.Tensor:
    """By torch's matmul with a scale for each row and each column. Fast accumulation: partial sums
    are rounded to 14 bits now and then, below the rounding of the operands."""
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
