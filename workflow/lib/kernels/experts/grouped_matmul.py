"""Matmuls of rows with the weights of each row's expert.

Rows are sorted by expert, and the ends of the ranges stay on the device: no GPU waits for the host.
Our kernels compute all matmuls at once, read each row in place, and add its bias and its adapter's
part. torch's grouped matmul needs rows copied into the order of the experts, and knows neither bias
nor initial term. It serves GPUs without our kernels; CPUs loop over experts."""

import math
from typing import NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.kernel_launch import WARPS, launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn
from workflow.lib.system.device_types import GPUS


class Routing(NamedTuple):
    """The expert of each row. A token has one row for each of its k experts."""

    order: torch.Tensor  # (T * k,) int64: place (token * k + choice) of each row, sorted by expert
    positions: torch.Tensor  # (T, k) int64: the inverse, the row of each place
    ends: torch.Tensor  # (experts,) int32: where the rows of each expert end
    tiles: torch.Tensor | None  # the kernels' tiles of rows; None without kernels
    top_k: int

    @property
    def tokens(self) -> torch.Tensor:
        """The token (T * k,) of each row."""
        return self.order // self.top_k

    @property
    def experts(self) -> torch.Tensor:
        """The expert (T * k,) of each row."""
        rows = torch.arange(len(self.order), device=self.order.device)
        return torch.searchsorted(self.ends, rows, right=True)

    @property
    def counts(self) -> torch.Tensor:
        """The rows (experts,) of each expert."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))


class Rows(NamedTuple):
    """Inputs of the experts: a row for each row of the routing, or for each token, without a copy
    into the order of the experts."""

    values: torch.Tensor  # (R, width), or (T, width) if `by_token`
    by_token: bool = False
    scales: torch.Tensor | None = None  # of values in 8 bits: factor of each row, fp32


class Weights(NamedTuple):
    """The weights of all experts for one matmul."""

    values: torch.Tensor  # (experts, out, in), of any strides
    scales: torch.Tensor | None = None
    """In 8 bits: the factor of each expert's values (experts,) fp32."""


class Update(NamedTuple):
    """An adapter's part of a matmul: scale * B l."""

    low: torch.Tensor  # l (R, r)
    small: torch.Tensor  # b (experts, out, r)
    scale: float


TILE_ROWS = 128  # of a program
HALVES = True  # half tiles are computed where an expert has no more rows
SUM_TILE = {"columns": 128, "depth": 64}
SUM_WARPS, SUM_STAGES = 4, 3
TABLE_TILES = 32  # of a program that finds the experts of tiles
MOST_RANKS = 64  # of an adapter that a program has at a time


class Tile(NamedTuple):
    """The size of a program of a grouped matmul."""

    columns: int
    depth: int  # of the summed width, at a time
    warps: int
    stages: int
    parts: int = 1  # of the `TILE_ROWS`, one program each


WIDE, NARROW = Tile(256, 64, 8, 4), Tile(128, 32, 4, 3)
"""For a block's shared memory of at least `WIDE_BYTES`, and for less or 32-bit values."""
WIDE_EIGHT_BITS = Tile(256, 128, 8, 4)
WIDE_BYTES = 200 * 1024
FEW = {columns: Tile(columns, 64, 4, 4, parts=2) for columns in (16, 32, 64)}
"""For few outputs: an adapter's rank."""


def row_tiles(ends: torch.Tensor, *, num_rows: int) -> torch.Tensor:
    """Return expert and first row (2, tiles) int32 of each tile of `TILE_ROWS` rows of one expert.
    ends: (experts,) int32, the last row + 1 of each, of `num_rows`; expert -1: no tile."""
    num_experts = len(ends)
    # Each expert may have one tile that is not full.
    most = num_rows // TILE_ROWS + min(num_experts, num_rows)
    tiles = torch.empty((2, most), dtype=torch.int32, device=ends.device)
    launch(
        "experts.row_tiles", (-(-most // TABLE_TILES),), tiles, ends, num_experts, most,
        rows=TILE_ROWS, size=power_of_two(num_experts), tile_count=TABLE_TILES, num_warps=WARPS,
    )  # fmt: skip
    return tiles


def _rows_by_kernel(
    out: torch.Tensor,
    rows: Rows,
    weights: Weights,
    routing: Routing,
    update: Update | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill `out` (R, out), with contiguous columns, with x W^T of each row x and its expert's W, +
    the update, + the bias (experts, out); return it."""
    assert routing.tiles is not None
    values, num_columns = rows.values.contiguous(), out.shape[1]
    width, num_tiles = values.shape[1], routing.tiles.shape[1]
    low, small, scale = update or (values, weights.values, 1.0)  # unread, without update
    rank = low.shape[1] if update else 0
    tile = _tile(num_columns, values)
    added = values if bias is None else bias
    computed = len(out) + len(routing.ends) * TILE_ROWS / 2  # of each expert, half a tile is empty
    launch(
        "experts.rows_matmul", (num_tiles * tile.parts * -(-num_columns // tile.columns),),
        out, values, weights.values, routing.order, routing.tiles, routing.ends,
        low.contiguous() if update else low, small, added,
        values if rows.scales is None else rows.scales,
        values if weights.scales is None else weights.scales,
        num_columns, width, rank, num_tiles, routing.top_k, out.stride(0), values.stride(0),
        *weights.values.stride(), *small.stride(), added.stride(0), scale,
        by_token=rows.by_token, updated=update is not None, biased=bias is not None,
        scaled=weights.scales is not None,
        even=width % tile.depth == 0 and num_columns % tile.columns == 0,
        rows=TILE_ROWS // tile.parts, parts=tile.parts, halves=HALVES and tile.parts == 1,
        columns=tile.columns, depth=tile.depth,
        ranks=min(MOST_RANKS, max(16, power_of_two(rank or 1))), num_warps=tile.warps,
        num_stages=tile.stages, flop=2.0 * computed * num_columns * (width + rank),
    )  # fmt: skip
    return out


def _tile(num_columns: int, values: torch.Tensor) -> Tile:
    """Return the tile for a matmul of `values` with this many outputs."""
    few = max(16, power_of_two(num_columns))
    if values.itemsize == 2 and few in FEW:
        return FEW[few]
    if values.device.type == "cuda" and values.itemsize <= 2:
        properties = torch.cuda.get_device_properties(values.device)
        if getattr(properties, "shared_memory_per_block_optin", 0) >= WIDE_BYTES:
            return WIDE if values.itemsize == 2 else WIDE_EIGHT_BITS
    return NARROW


def _weights_by_kernel(
    out: torch.Tensor, left: torch.Tensor, right: Rows, routing: Routing, scale: float
) -> torch.Tensor:
    """Fill `out` (experts, r, n) fp32, of any strides, with the sums over each expert's rows of the
    outer products of left (R, r or more) and right (R, n), times `scale`; return it."""
    num_experts, rank, num_columns = out.shape
    values = right.values.contiguous()
    ranks = min(MOST_RANKS, max(16, power_of_two(rank)))
    grid = (-(-num_columns // SUM_TILE["columns"]), num_experts, -(-rank // ranks))
    launch(
        "experts.weights_matmul", grid, out, left, values, routing.order, routing.ends,
        num_columns, rank, routing.top_k, left.stride(0), values.stride(0), *out.stride(), scale,
        by_token=right.by_token, ranks=ranks, **SUM_TILE, num_warps=SUM_WARPS,
        num_stages=SUM_STAGES, flop=2.0 * len(left) * rank * num_columns,
    )  # fmt: skip
    return out


SQUARE = 64  # of a program that transposes


def _transposed_by_kernel(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    assert all(y.is_contiguous() for y in (out, x)), "the kernel knows no other strides"
    squares = math.prod(-(-length // SQUARE) for length in x.shape)
    launch("experts.transpose", (squares,), out, x, *x.shape, size=SQUARE, num_warps=WARPS)
    return out


def _transposed_by_torch(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return out.copy_(x.t())


def _case_of_transposition(device: torch.device, dtype: torch.dtype) -> Case:
    (x,) = drawn(device, torch.float32, (70, 5))
    return torch.empty(5, 70, dtype=dtype, device=device), x


transposed = Op(
    "transposed matrices",
    reference=_transposed_by_torch,
    kernel=_transposed_by_kernel,
    case=_case_of_transposition,
    exact=True,
)
"""Fills `out` (columns, rows) with x (rows, columns), rounded to its type, and returns it. torch's
copy reads or writes single values far apart (128 experts, rank 256: 0.8 to 1.5 ms for 0.3 GB, H200,
2026-11-30)."""


PROGRAM_ELEMENTS = 2048
ROW_UNIT = 8
"""16-bit values in 16 bytes: torch's grouped matmuls need rows of whole units on GPUs."""


def route(top_k_index: torch.Tensor, *, num_experts: int) -> Routing:
    """Return the rows of tokens whose experts are `top_k_index` (T, k)."""
    routing = _sorted_by_expert(top_k_index, num_experts=num_experts)
    if not _rows_matmul.works_on(top_k_index.device, torch.bfloat16):
        return routing
    return _with_tiles(routing)


def _sorted_by_expert(top_k_index: torch.Tensor, *, num_experts: int) -> Routing:
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    numbers = torch.arange(max(num_experts, len(order)), device=order.device)
    ends = torch.searchsorted(experts, numbers[:num_experts], right=True, out_int32=True)
    positions = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
    return Routing(order, positions.view(top_k_index.shape), ends, None, top_k_index.shape[-1])


def _with_tiles(routing: Routing) -> Routing:
    tiles = row_tiles(routing.ends, num_rows=len(routing.order))
    return routing._replace(tiles=tiles)


def _sum_by_kernel(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    num_tokens, top_k = positions.shape
    width = rows.shape[1]
    out = rows.new_empty(num_tokens, width)
    launch(
        "elementwise.sum_by_token", (num_tokens, -(-width // PROGRAM_ELEMENTS)), out,
        rows.contiguous(), positions.contiguous(),
        positions if weights is None else weights.contiguous(),  # an unread pointer without weights
        width, top_k, weighted=weights is not None, size=PROGRAM_ELEMENTS, num_warps=WARPS,
    )  # fmt: skip
    return out


def _sum_by_torch(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    total = rows.new_zeros((len(positions), rows.shape[1]), dtype=torch.float32)
    for choice in range(positions.shape[1]):
        part = rows[positions[:, choice]]
        if weights is None:
            total += part
        else:
            total.addcmul_(part, weights[:, choice, None])
    return total.to(rows.dtype)


def _case_of_sum(device: torch.device, dtype: torch.dtype) -> Case:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(15, 40, generator=draw).to(device, dtype)
    weights = torch.rand(5, 3, generator=draw).to(device, dtype)
    return rows, torch.randperm(15, generator=draw).view(5, 3).to(device), weights


sum_by_token = Op(
    "sums of experts' rows", reference=_sum_by_torch, kernel=_sum_by_kernel, case=_case_of_sum
)
"""Returns the sum (T, width) of each token's rows (T * k, width), at `positions` (T, k), times
`weights` (T, k) if any, in fp32, rounded once, in the order of choices, without a copy of the
rows."""


def rows_matmul(
    rows: Rows,
    weights: Weights,
    routing: Routing,
    *,
    update: Update | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T (R, out) of each row x (in,) with its expert's W, + update, + bias (experts,
    out). out: destination with contiguous columns, by default a new tensor."""
    if out is None:
        out = rows.values.new_empty(len(routing.order), weights.values.shape[1])
    return _rows_matmul(out, rows, weights, routing, update, bias)


def _rows_by_torch(
    out: torch.Tensor,
    rows: Rows,
    weights: Weights,
    routing: Routing,
    update: Update | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if weights.scales is None:
        _grouped_mm(out, _sorted(rows, routing), weights.values, routing)
    else:
        _scaled_grouped_mm(out, rows, weights, routing)
    if update is not None:
        grad_low = torch.empty_like(out, memory_format=torch.contiguous_format)
        _grouped_mm(grad_low, update.low, update.small, routing)
        out.add_(grad_low, alpha=update.scale)
    return out if bias is None else out.add_(bias[routing.experts])


def bias_products(rows: Rows, bias: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return x b (T, k) fp32 of each row x and the bias b (experts, width) of its expert."""
    if routing.tiles is not None:
        products = torch.empty(len(routing.order), 1, dtype=torch.float32, device=bias.device)
        rows_matmul(rows, Weights(bias[:, None]), routing, out=products)
    else:
        products = (_sorted(rows, routing) * bias[routing.experts]).sum(1, dtype=torch.float32)
    return products.view(-1)[routing.positions]


def _weights_by_torch(
    out: torch.Tensor, left: torch.Tensor, right: Rows, routing: Routing, scale: float
) -> torch.Tensor:
    sorted_right = _sorted(right, routing)
    if _torch_groups(left):
        sums = nn.functional.grouped_mm(left.t(), sorted_right, offs=routing.ends)
        # Otherwise the kernel leaves a sum over no rows undefined.
        empty = (routing.counts == 0)[:, None, None]
        sums = sums.float().masked_fill_(empty, 0.0)
    else:
        sums = left.new_empty(len(routing.ends), left.shape[1], sorted_right.shape[1])
        for expert, (start, stop) in enumerate(_ranges(routing)):
            torch.mm(left[start:stop].t(), sorted_right[start:stop], out=sums[expert])
        sums = sums.float()
    return out.copy_(sums[:, : out.shape[1]]).mul_(scale)


def _grouped_mm(
    out: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, routing: Routing
) -> None:
    """Fill `out` with the matmuls of rows (R, in) without kernels of our own."""
    transposed = weights.transpose(1, 2)
    if _torch_groups(rows):
        out.copy_(nn.functional.grouped_mm(rows, transposed, offs=routing.ends))
        return
    for expert, (start, stop) in enumerate(_ranges(routing)):
        torch.mm(rows[start:stop], transposed[expert], out=out[start:stop])


def _scaled_grouped_mm(out: torch.Tensor, rows: Rows, weights: Weights, routing: Routing) -> None:
    """The same of values in 8 bits, in fp32."""
    assert rows.scales is not None
    assert weights.scales is not None
    exact = Rows(rows.values.float() * rows.scales, rows.by_token)
    scaled = weights.values.float() * weights.scales[:, None, None]
    total = torch.empty_like(out, dtype=torch.float32)
    _grouped_mm(total, _sorted(exact, routing), scaled, routing)
    out.copy_(total)


def _torch_groups(rows: torch.Tensor) -> bool:
    """Whether torch multiplies all groups at once without waiting for the device."""
    return rows.device.type in GPUS and rows.itemsize == 2


def _sorted(rows: Rows, routing: Routing) -> torch.Tensor:
    """Return the rows in the order of the experts."""
    return rows.values[routing.tokens] if rows.by_token else rows.values


def _ranges(routing: Routing) -> list[tuple[int, int]]:
    """Return the ranges of each expert's rows; a GPU would wait for the device."""
    ends = routing.ends.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _case_routing(device: torch.device) -> Routing:
    """Return the routing of 5 tokens to 2 of 4 experts each, the third of which has no row."""
    index = torch.tensor([[0, 1], [3, 0], [1, 3], [0, 3], [3, 1]], device=device)
    return _with_tiles(_sorted_by_expert(index, num_experts=4))


def _case_of_rows(device: torch.device, dtype: torch.dtype) -> Case:
    draw = torch.Generator().manual_seed(0)
    sizes = ((5, 48), (4, 40, 48), (10, 3), (4, 40, 3), (4, 40))
    rows, weights, low, small, bias = (torch.randn(x, generator=draw).to(device) for x in sizes)
    scales: tuple[torch.Tensor | None, ...] = (None, None)
    if dtype.itemsize == 1:
        scales = (
            torch.rand(5, 1, generator=draw).to(device),
            torch.rand(4, generator=draw).to(device),
        )
    added = dtype if dtype.itemsize > 1 else torch.bfloat16
    low, small, bias = (x.to(added) for x in (low, small, bias))
    return (
        torch.empty(10, 40, dtype=added, device=device),
        Rows(rows.to(dtype), by_token=True, scales=scales[0]),
        Weights(weights.to(dtype), scales[1]),
        _case_routing(device),
        Update(low, small, 0.5),
        bias,
    )


def _case_of_weights(device: torch.device, dtype: torch.dtype) -> Case:
    left, right = drawn(device, dtype, (10, 3), (5, 40))
    out = torch.empty(4, 3, 40, device=device)
    return out, left, Rows(right, by_token=True), _case_routing(device), 0.5


weights_matmul = Op(
    "gradients of experts' adapters",
    reference=_weights_by_torch,
    kernel=_weights_by_kernel,
    case=_case_of_weights,
    variant=lambda out, left, *_: (left.dtype,),
    supports=lambda out, left, right, routing, *_: routing.tiles is not None,
)
"""Fills `out` (experts, m, n) fp32 with the sums over each expert's rows of the outer products of
left (R, m or more) and right (R, n), times `scale`; 0 for an expert without rows. Returns it."""
_rows_matmul = Op(
    "matmuls of experts",
    reference=_rows_by_torch,
    kernel=_rows_by_kernel,
    case=_case_of_rows,
    variant=lambda out, rows, *_: (rows.values.dtype,),
    supports=lambda out, rows, weights, routing, *_: routing.tiles is not None,
)
