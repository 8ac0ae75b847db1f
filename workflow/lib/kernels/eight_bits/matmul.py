"""Matmuls of frozen weights in float8: rounding of weights and activations, and the matmul.

A weight row n has a scale s_n = max_k |W_nk| / L, for float8's largest value L; in NF4 s_n = max_b
|absmax_(n,b)| / L, as no code is above 1. The forward matmul is y_tn = s_n a_t sum_k W'_nk x'_tk,
with W' = W / s and x' = x / a in float8, and a scale a for each token. Backward sums over the rows
n, so s is folded into the gradient before that is rounded: g'_tn a_t = g_tn s_n.

On a GPU kernels do this; their sizes were the fastest of those tried on an H200 for weights of
28,672 x 8,192 and 4,096 x 14,336. A CPU computes the same values and multiplies them in fp32,
slowly, for tests and checks."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import quantize_4bit

from workflow.lib.kernels.kernel_launch import WARPS, launch, power_of_two
from workflow.lib.kernels.nf4.decode import NF4Data
from workflow.lib.kernels.op import Case, Op, drawn, first_tensor
from workflow.lib.system.device_types import GPUS
from workflow.lib.system.errors import UserError

FLOAT8, LARGEST = torch.float8_e4m3fn, 448.0  # the format, and its largest value
SMALLEST_SCALE = 1e-30  # of a row of zeros
# Elements of a row in a program at a time; up to WHOLE_ROW all of them are in registers.
ROW_ELEMENTS, ROW_WARPS, WHOLE_ROW = 2048, 8, 32768
THREAD_ELEMENTS = 32  # of such a row


class Rounded(NamedTuple):
    """Activations or gradients in 8 bits."""

    values: torch.Tensor  # (T, width)
    scales: torch.Tensor  # (T, 1) fp32


def unfilled(size: Sequence[int], device: torch.device, *, dtype: torch.dtype = FLOAT8) -> Rounded:
    """Return unfilled values and scales of rows of this size (T, width)."""
    values = torch.empty(size, dtype=dtype, device=device)
    return Rounded(values, torch.empty((size[0], 1), dtype=torch.float32, device=device))


def by_kernel_on_gpus(op: Op[Any, Any], *inputs: Any) -> Any:
    """Compute by torch's operations on CPUs alone: on a GPU they exceed the planned memory. Raises
    `UserError` on a GPU that cannot use the kernel."""
    if not op.takes_kernel(*inputs) and first_tensor(inputs).device.type in GPUS:
        raise UserError(
            f"train.matmul_dtype: float8 on a GPU needs the kernel for {op.name}, which cannot be "
            "used here (see the log). Install Triton with a C compiler, or set it to compute_dtype."
        )
    return op(*inputs)


def rounded(rows: torch.Tensor, *, factors: torch.Tensor | None = None) -> Rounded:
    """Return rows (T, width), times `factors` (width,) fp32 of their columns, in 8 bits. A row with
    NaN or infinity has the scale infinity: matmuls with it are not finite."""
    made = unfilled(rows.shape, rows.device)
    by_kernel_on_gpus(round_rows, *made, rows, factors)
    return made


def _round_by_kernel(
    values: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    factors: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows.contiguous()
    num_rows, width = rows.shape
    inputs = (scales, rows, rows if factors is None else factors, width)
    options: dict[str, Any] = {"most": LARGEST, "folds": factors is not None}
    launch("eight_bits.round_rows", (num_rows,), values, *inputs, **_row_program(width), **options)
    return values, scales


def _round_by_torch(
    values: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    factors: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = rows.float() if factors is None else rows.float() * factors
    largest = exact.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(dim=1, keepdim=True)
    scales.copy_((largest / LARGEST).clamp_min(SMALLEST_SCALE))
    return values.copy_(exact * scales.reciprocal()), scales


def _row_program(width: int) -> dict[str, Any]:
    """Return the sizes of a program for one row."""
    size = power_of_two(width)
    if size > WHOLE_ROW:
        return {"whole": False, "size": ROW_ELEMENTS, "num_warps": ROW_WARPS}
    return {
        "whole": True,
        "size": size,
        "num_warps": min(32, max(4, size // 32 // THREAD_ELEMENTS)),
    }


def _case_of_rows(device: torch.device, dtype: torch.dtype) -> Case:
    rows, factors = drawn(device, torch.float32, (5, 192), (192,))
    return *unfilled(rows.shape, device, dtype=dtype), rows, factors


round_rows = Op(
    "rounding to float8", reference=_round_by_torch, kernel=_round_by_kernel, case=_case_of_rows
)
"""Fills values and scales with `rows`, and returns them."""


DECODED_BLOCKS = 64  # of a program
TRANSPOSED_ROWS = 128  # of a program
CASE_SHAPE = (16, 128)
TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 64, 128, 8  # of a 16-bit weight
CASE_STACK = (2, 70, 132)  # tiles are cut


Stored = NF4Data | torch.Tensor
"""A frozen weight: in NF4, or (out, in) in 16 bits."""


class RoundedWeight(NamedTuple):
    """A weight in 8 bits, as one matmul uses it."""

    values: torch.Tensor  # (N, K), for a matmul that sums over K
    scales: torch.Tensor | None  # (N,) fp32; None for ones


def row_scales(stored: Stored, shape: tuple[int, int]) -> torch.Tensor:
    """Return the scales s (out,) fp32 of the rows of a weight (out, in)."""
    scales: torch.Tensor
    if isinstance(stored, torch.Tensor):
        rows = stored.view(shape)
        most = torch.linalg.vector_norm(rows, torch.inf, dim=1, dtype=torch.float32)
        scales = (most / LARGEST).clamp_min_(SMALLEST_SCALE)
    else:
        scales = by_kernel_on_gpus(scales_of_rows, stored, shape)
    return scales


def _scales_by_kernel(data: NF4Data, shape: tuple[int, int]) -> torch.Tensor:
    num_rows, width = shape
    scales = torch.empty(num_rows, dtype=torch.float32, device=data.code.device)
    row_blocks = width // data.block_size
    launch(
        "eight_bits.row_scales", (num_rows,), scales, *data.scale_parts, data.nested_code,
        data.offset, row_blocks, most=LARGEST, double=data.doubly_quantized,
        size=min(512, power_of_two(row_blocks)), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return scales


def _scales_by_torch(data: NF4Data, shape: tuple[int, int]) -> torch.Tensor:
    most = _block_scales(data, shape).abs().amax(dim=1)
    return (most / LARGEST).clamp_min(SMALLEST_SCALE)


def _case_data(device: torch.device) -> NF4Data:
    (weights,) = drawn(device, torch.float32, CASE_SHAPE)
    made: Any = quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
    return NF4Data.of(*made)


scales_of_rows = Op(
    "scales of weights' rows",
    reference=_scales_by_torch,
    kernel=_scales_by_kernel,
    case=lambda device: (_case_data(device), CASE_SHAPE),
    variant=lambda *_: (),
)


class StoredStack(NamedTuple):
    """Weights (experts, rows, width); a linear is one expert."""

    stored: Stored
    experts: int
    rows: int
    width: int

    @property
    def by_expert(self) -> tuple[int, int]:
        """The shape with one row per expert."""
        return self.experts, self.rows * self.width

    @property
    def data(self) -> NF4Data:
        """The weights, of a stack in NF4."""
        assert isinstance(self.stored, NF4Data)
        return self.stored

    def plain(self, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 16-bit weights (experts, rows, width), and the scale of each row."""
        assert isinstance(self.stored, torch.Tensor)
        by_row = scales.view(self.experts, -1).expand(-1, self.rows)
        return self.stored.view(self.experts, self.rows, self.width), by_row

    def decode_by_kernel(
        self,
        kernel: str,
        grid: tuple[int, ...],
        out: torch.Tensor,
        scales: torch.Tensor,
        *sizes: int,
        **options: int,
    ) -> torch.Tensor:
        """Start a kernel that writes NF4 weights, divided by `scales`, to `out`; return it."""
        data = self.data
        scale_blocks = self.experts * self.rows * self.width // data.block_size // len(scales)
        launch(
            kernel, grid, out, data.packed, *data.scale_parts, data.code, data.nested_code,
            data.offset, scales, *sizes, scale_blocks, **options, block_size=data.block_size,
            double=data.doubly_quantized, enable_fp_fusion=False,
        )  # fmt: skip
        return out


def decoded(
    stored: Stored,
    scales: torch.Tensor,
    shape: tuple[int, int],
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Return W' = W / s of a weight W in 8 bits, (out, in), or transposed (in, out)."""
    in_float8 = columns_in_float8 if transposed else rows_in_float8
    return in_float8(StoredStack(stored, 1, *shape), scales, 0, shape[transposed])[0]


def rows_in_float8(stack: StoredStack, scales: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return rows `start` to `stop` of all experts (experts, stop - start, width) in 8 bits,
    divided by their `scales` fp32: one for each expert, or for each row."""
    if isinstance(stack.stored, torch.Tensor):
        weights, by_row = stack.plain(scales)
        return round_weight(weights[:, start:stop], by_row[:, start:stop])
    made: torch.Tensor = by_kernel_on_gpus(decode_rows, stack, scales, start, stop, FLOAT8)
    return made


def columns_in_float8(
    stack: StoredStack, scales: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """Return columns in the same way, transposed: (experts, stop - start, rows)."""
    if isinstance(stack.stored, torch.Tensor):
        weights, by_row = stack.plain(scales)
        return round_weight(weights[..., start:stop], by_row, transposed=True)
    made: torch.Tensor = by_kernel_on_gpus(decode_columns, stack, scales, start, stop, FLOAT8)
    return made


def _rows_by_kernel(
    stack: StoredStack, scales: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    block, width = stack.data.block_size, stack.width
    out = torch.empty((stack.experts, stop - start, width), dtype=dtype, device=scales.device)
    num_blocks = out.numel() // block
    strides = (x * width // block for x in (start, stop - start, stack.rows))
    grid = (-(-num_blocks // DECODED_BLOCKS),)
    return stack.decode_by_kernel(
        "eight_bits.decode_rows", grid, out, scales, num_blocks, *strides,
        blocks=DECODED_BLOCKS, num_warps=WARPS // 2,
    )  # fmt: skip


def _columns_by_kernel(
    stack: StoredStack, scales: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    block = stack.data.block_size
    out = torch.empty((stack.experts, stop - start, stack.rows), dtype=dtype, device=scales.device)
    grid = (-(-stack.rows // TRANSPOSED_ROWS), (stop - start) // block, stack.experts)
    return stack.decode_by_kernel(
        "eight_bits.decode_columns", grid, out, scales, stack.rows, stack.width // block,
        start // block, rows=TRANSPOSED_ROWS, num_warps=WARPS,
    )  # fmt: skip


def _whole(stack: StoredStack, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    data, count = stack.data, stack.experts * stack.rows * stack.width
    packed = data.packed.view(torch.uint8).flatten()[: count // 2].int()
    pairs = torch.cartesian_prod(data.code, data.code).index_select(0, packed)  # of each byte
    ratios = _block_scales(data, (len(scales), count // len(scales))) / scales[:, None]
    values = (pairs.view(*ratios.shape, -1) * ratios[..., None]).to(dtype)
    return values.view(stack.experts, stack.rows, stack.width)


def _rows_by_torch(
    stack: StoredStack, scales: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    return _whole(stack, scales, dtype)[:, start:stop]


def _columns_by_torch(
    stack: StoredStack, scales: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    return _whole(stack, scales, dtype)[..., start:stop].mT.contiguous()


def _case_of_stack(device: torch.device, dtype: torch.dtype, stop: int) -> Case:
    stack = StoredStack(_case_data(device), 2, CASE_SHAPE[0] // 2, CASE_SHAPE[1])
    scales = _scales_by_torch(stack.data, CASE_SHAPE)
    return stack, scales, 0, stop, dtype


decode_rows = Op(
    "rows of weights in float8",
    reference=_rows_by_torch,
    kernel=_rows_by_kernel,
    case=lambda device, dtype: _case_of_stack(device, dtype, 6),
    variant=lambda *args: (args[-1],),
)
"""Returns rows `start` to `stop` of all experts (experts, stop - start, width), divided by their
`scales` fp32, in an 8-bit dtype. scales: one for each expert, or for each row."""
decode_columns = Op(
    "columns of weights in float8",
    reference=_columns_by_torch,
    kernel=_columns_by_kernel,
    case=lambda device, dtype: _case_of_stack(device, dtype, 64),
    variant=lambda *args: (args[-1],),
)
"""Returns columns in the same way, transposed: (experts, stop - start, rows)."""


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
    """The same by torch's matmul with a scale for each row and column. Fast accumulation: partial
    sums are rounded to 14 bits at intervals, finer than the rounding of the operands."""
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


def round_weight(
    weight: torch.Tensor, scales: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Return weights (experts, rows, columns) of any strides over the rows' scales (experts, rows)
    fp32, in float8, contiguous; transposed: (experts, columns, rows)."""
    op = weight_columns if transposed else weight_rows
    made: torch.Tensor = by_kernel_on_gpus(op, weight, scales, FLOAT8)
    return made


def _round_weight_by_kernel(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, transposed: bool
) -> torch.Tensor:
    experts, rows, columns = weight.shape
    assert weight.stride(2) == 1, "rows of weights are contiguous"
    size = (experts, columns, rows) if transposed else (experts, rows, columns)
    out = torch.empty(size, dtype=dtype, device=weight.device)
    grid = (-(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), experts)
    launch(
        "eight_bits.round_weight", grid, out, weight, scales, rows, columns,
        *weight.stride()[:2], *scales.stride(), transposed=transposed,
        tile_rows=TILE_ROWS, tile_columns=TILE_COLUMNS, num_warps=TILE_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _round_weight_by_torch(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, transposed: bool
) -> torch.Tensor:
    values = (weight.float() * scales.reciprocal()[..., None]).to(dtype)
    return (values.mT if transposed else values).contiguous()


def _case_of_weight(device: torch.device, dtype: torch.dtype) -> Case:
    weight, scales = drawn(device, torch.bfloat16, CASE_STACK, CASE_STACK[:2])
    return weight, scales.float().abs() + 1.0, dtype


def _rounding_of_weights(name: str, *, transposed: bool) -> Op[Any, torch.Tensor]:
    return Op(
        name,
        reference=partial(_round_weight_by_torch, transposed=transposed),
        kernel=partial(_round_weight_by_kernel, transposed=transposed),
        case=_case_of_weight,
        variant=lambda *args: (args[-1],),
    )


weight_rows = _rounding_of_weights("rows of 16-bit weights in float8", transposed=False)
weight_columns = _rounding_of_weights("columns of 16-bit weights in float8", transposed=True)
