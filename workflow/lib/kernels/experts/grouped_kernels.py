"""GPU kernels of a mixture's experts: grouped products that read each row where it lies and add
what belongs to it, and what is computed between the two products.

torch's grouped product wants its rows copied into the order of the experts, knows neither bias nor
a term to begin with, and writes whole tensors. Here a token's row is read by its number, a slice of
the outputs is written where it belongs, and sums of gradients are written in fp32 as the masters
lie. `grouped_matmul` says what is computed, and computes it without these kernels elsewhere.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import increment_version

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.kernels.experts.routing import Routing, Rows, Update, Weights
from workflow.lib.system.device_types import RECORDED

TILE_ROWS = 128  # of a program
HALVES = True  # of tiles are computed where an expert has no more rows
SUM_TILE = {"columns": 128, "depth": 64}
SUM_WARPS, SUM_STAGES = 4, 3
PROGRAM_ELEMENTS, WARPS = 1024, 4
TABLE_TILES = 32  # of a program that looks for their experts
DECODED_BLOCKS, DECODED_ROWS = 64, 128  # of a program
MOST_RANKS = 64  # of an adapter that a program has at a time

if kernels.INSTALLED:
    from workflow.lib.kernels.triton_code import experts as triton_code


class Tile(NamedTuple):
    """How a program of a grouped product is cut."""

    columns: int
    depth: int
    """Of the width that is summed over, at a time."""
    warps: int
    stages: int
    parts: int = 1
    """Of the `TILE_ROWS`, for as many programs."""


WIDE, NARROW = Tile(256, 64, 8, 4), Tile(128, 32, 4, 3)
"""For a block's shared memory of at least `WIDE_BYTES`, and for less or 32-bit values."""
WIDE_EIGHT_BITS = Tile(256, 128, 8, 4)
WIDE_BYTES = 200 * 1024
FEW = {columns: Tile(columns, 64, 4, 4, parts=2) for columns in (16, 32, 64)}
"""For few outputs: an adapter's rank."""


def _launch(
    name: str, grid: tuple[int, ...], out: torch.Tensor, *arguments: Any, **options: Any
) -> None:
    """Start a kernel that writes to `out`; a device that is recorded computes nothing."""
    if out.device.type != RECORDED:
        getattr(triton_code, name)[grid](out, *arguments, **options)


def row_tiles(ends: torch.Tensor, *, num_rows: int) -> torch.Tensor:
    """Return expert and first row (2, tiles) int32 of each tile of `TILE_ROWS` rows of one expert,
    where `ends` (experts,) int32 says how `num_rows` rows are shared; expert -1: no tile.
    """
    num_experts = len(ends)
    # Each expert may have one tile that is not full.
    most = num_rows // TILE_ROWS + min(num_experts, num_rows)
    tiles = torch.empty((2, most), dtype=torch.int32, device=ends.device)
    _launch(
        "row_tiles", (-(-most // TABLE_TILES),), tiles, ends, num_experts, most,
        rows=TILE_ROWS, size=kernels.power_of_two(num_experts), some=TABLE_TILES, num_warps=WARPS,
    )  # fmt: skip
    return tiles


def rows_product(
    out: torch.Tensor,
    rows: Rows,
    weights: Weights,
    routing: Routing,
    *,
    update: Update | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Fill `out` (R, out), whose columns are contiguous, with x W^T of each row x and its expert's
    W, and + the update, and + the bias (experts, out); return it.
    """
    assert routing.tiles is not None
    values, num_columns = rows.values.contiguous(), out.shape[1]
    width, num_tiles = values.shape[1], routing.tiles.shape[1]
    low, small, scale = update or (values, weights.values, 1.0)  # pointers that are not read, else
    rank = low.shape[1] if update else 0
    tile = _tile(num_columns, values)
    added = values if bias is None else bias
    _launch(
        "rows_product",
        (num_tiles * tile.parts * -(-num_columns // tile.columns),),
        out,
        values,
        weights.values,
        routing.order,
        routing.tiles,
        routing.ends,
        low.contiguous() if update else low,
        small,
        added,
        values if rows.scales is None else rows.scales,
        values if weights.scales is None else weights.scales,
        num_columns,
        width,
        rank,
        num_tiles,
        routing.top_k,
        out.stride(0),
        values.stride(0),
        *weights.values.stride(),
        *small.stride(),
        added.stride(0),
        scale,
        by_token=rows.by_token,
        updated=update is not None,
        biased=bias is not None,
        scaled=weights.scales is not None,
        even=width % tile.depth == 0 and num_columns % tile.columns == 0,
        rows=TILE_ROWS // tile.parts,
        parts=tile.parts,
        halves=HALVES and tile.parts == 1,
        columns=tile.columns,
        depth=tile.depth,
        ranks=min(MOST_RANKS, max(16, kernels.power_of_two(rank or 1))),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def _tile(num_columns: int, values: torch.Tensor) -> Tile:
    """Return the tile for a product of `values` with this many outputs."""
    few = max(16, kernels.power_of_two(num_columns))
    if values.itemsize == 2 and few in FEW:
        return FEW[few]
    if values.device.type == "cuda" and values.itemsize <= 2:
        properties = torch.cuda.get_device_properties(values.device)
        if getattr(properties, "shared_memory_per_block_optin", 0) >= WIDE_BYTES:
            return WIDE if values.itemsize == 2 else WIDE_EIGHT_BITS
    return NARROW


def weights_product(
    out: torch.Tensor, left: torch.Tensor, right: Rows, routing: Routing, *, scale: float
) -> torch.Tensor:
    """Fill `out` (experts, r, n) fp32, of any strides, with the sums over each expert's rows of the
    outer products of left (R, r or more) and right (R, n), times `scale`; return it.
    """
    num_experts, rank, num_columns = out.shape
    values = right.values.contiguous()
    ranks = min(MOST_RANKS, max(16, kernels.power_of_two(rank)))
    grid = (-(-num_columns // SUM_TILE["columns"]), num_experts, -(-rank // ranks))
    _launch(
        "weights_product", grid, out, left, values, routing.order, routing.ends, num_columns, rank,
        routing.top_k, left.stride(0), values.stride(0), *out.stride(), scale,
        by_token=right.by_token, ranks=ranks, **SUM_TILE,
        num_warps=SUM_WARPS, num_stages=SUM_STAGES,
    )  # fmt: skip
    return out


class GateForm(NamedTuple):
    """What the kernels compute of gate and up."""

    kind: str
    """`silu` or `gelu_tanh`: act(gate) * up, side by side. `clamped`: g sigmoid(alpha g) (u + 1) of
    g at most `limit` and u within +-`limit`, gate and up in turn (gpt-oss).
    """
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        """What the kernels are compiled for."""
        return {"kind": self.kind, "alternating": self.kind == "clamped", "num_warps": WARPS}


def gated(up: torch.Tensor, form: GateForm) -> torch.Tensor:
    """Return what `form` makes (R, f) of gate and up (R, 2 f)."""
    num_rows, width = up.shape[0], up.shape[1] // 2
    product = up.new_empty(num_rows, width)
    size = min(PROGRAM_ELEMENTS, kernels.power_of_two(width))
    _launch(
        "gated", (num_rows, -(-width // size)), product, up.contiguous(), width,
        form.alpha, form.limit, size=size, **form.options,
    )  # fmt: skip
    return product


def gated_backward_(
    grad: torch.Tensor,
    up: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    form: GateForm,
) -> torch.Tensor:
    """In place, for the gradient `grad` (R, f) of what `form` makes before it is multiplied by its
    row's weight: `grad` becomes the product, `up` (R, 2 f) its gradient, times the weight.

    weights: (T, k), where `order` (R,) has a row's place. Return their gradients (T, k) fp32.
    """
    num_rows, width = grad.shape
    of_weights = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    size = min(PROGRAM_ELEMENTS, kernels.power_of_two(width))
    _launch(
        "gated_backward", (num_rows,), of_weights, grad, up, weights.contiguous(), order, width,
        form.alpha, form.limit, size=size, **form.options,
    )  # fmt: skip
    # As for `kernels.act_and_mul_backward_`: a second backward is refused.
    increment_version((grad, up))
    return of_weights


class PackedStack(Protocol):
    """NF4 weights (experts, expert_rows, in_features) of all experts of a layer."""

    spec: Any
    """With `block_size` and `double_quant`."""
    num_experts: int
    expert_rows: int
    in_features: int

    def nf4_data(self) -> kernels.NF4Data:
        """Return the stack as it is stored."""


def decode_rows(
    base: PackedStack, start: int, stop: int, *, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows `start` to `stop` of all experts (experts, stop - start, in), divided by their
    `scales` (experts,) fp32, in a type of 8 bits.
    """
    block, width = base.spec.block_size, base.in_features
    shape = (base.num_experts, stop - start, width)
    out = torch.empty(shape, dtype=dtype, device=scales.device)
    num_blocks = out.numel() // block
    runs = (x * width // block for x in (start, stop - start, base.expert_rows))
    _launch(
        "decode_rows", (-(-num_blocks // DECODED_BLOCKS),), out, *_stored(base), scales,
        num_blocks, *runs, blocks=DECODED_BLOCKS, num_warps=WARPS // 2, **_coding(base),
    )  # fmt: skip
    return out


def decode_columns(
    base: PackedStack, start: int, stop: int, *, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return columns `start` to `stop` of all experts in the same way, transposed: (experts, stop -
    start, out).
    """
    block = base.spec.block_size
    shape = (base.num_experts, stop - start, base.expert_rows)
    out = torch.empty(shape, dtype=dtype, device=scales.device)
    grid = (-(-base.expert_rows // DECODED_ROWS), (stop - start) // block, base.num_experts)
    _launch(
        "decode_columns", grid, out, *_stored(base), scales,
        base.expert_rows, base.in_features // block, start // block,
        rows=DECODED_ROWS, num_warps=WARPS, **_coding(base),
    )  # fmt: skip
    return out


def _stored(base: PackedStack) -> tuple[torch.Tensor, ...]:
    """Return what a stack's blocks are decoded from."""
    data = base.nf4_data()
    nested = data.absmax if data.nested_absmax is None else data.nested_absmax
    return (data.packed, data.absmax, nested, data.code, data.nested_code, data.offset)


def _coding(base: PackedStack) -> dict[str, Any]:
    # As for `kernels.dequantize_nf4`: products and sums are not contracted.
    double = base.spec.double_quant
    return {"block_size": base.spec.block_size, "double": double, "enable_fp_fusion": False}
