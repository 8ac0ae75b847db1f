"""GPU kernels of grouped matmuls, which read each row where it lies and add what belongs to it.

torch's wants rows copied into the order of the experts, and knows no bias and no term to begin
with. `grouped_matmul` says what is computed, and computes it elsewhere."""

from typing import NamedTuple

import torch

from workflow.lib.kernels.experts.routing import Routing, Rows, Update, Weights
from workflow.lib.kernels.launch import WARPS, launch, power_of_two

TILE_ROWS = 128  # of a program
HALVES = True  # of tiles are computed where an expert has no more rows
SUM_TILE = {"columns": 128, "depth": 64}
SUM_WARPS, SUM_STAGES = 4, 3
TABLE_TILES = 32  # of a program that looks for their experts
MOST_RANKS = 64  # of an adapter that a program has at a time


class Tile(NamedTuple):
    """How a program of a grouped matmul is cut."""

    columns: int
    depth: int  # of the width that is summed over, at a time
    warps: int
    stages: int
    parts: int = 1  # of the `TILE_ROWS`, for as many programs


WIDE, NARROW = Tile(256, 64, 8, 4), Tile(128, 32, 4, 3)
"""For a block's shared memory of at least `WIDE_BYTES`, and for less or 32-bit values."""
WIDE_EIGHT_BITS = Tile(256, 128, 8, 4)
WIDE_BYTES = 200 * 1024
FEW = {columns: Tile(columns, 64, 4, 4, parts=2) for columns in (16, 32, 64)}
"""For few outputs: an adapter's rank."""


def row_tiles(ends: torch.Tensor, *, num_rows: int) -> torch.Tensor:
    """Return expert and first row (2, tiles) int32 of each tile of `TILE_ROWS` rows of one expert,
    where `ends` (experts,) int32 says how `num_rows` rows are shared; expert -1: no tile."""
    num_experts = len(ends)
    # Each expert may have one tile that is not full.
    most = num_rows // TILE_ROWS + min(num_experts, num_rows)
    tiles = torch.empty((2, most), dtype=torch.int32, device=ends.device)
    launch(
        "experts.row_tiles", (-(-most // TABLE_TILES),), tiles, ends, num_experts, most,
        rows=TILE_ROWS, size=power_of_two(num_experts), some=TABLE_TILES, num_warps=WARPS,
    )  # fmt: skip
    return tiles


def rows_matmul(
    out: torch.Tensor,
    rows: Rows,
    weights: Weights,
    routing: Routing,
    update: Update | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Fill `out` (R, out), whose columns are contiguous, with x W^T of each row x and its expert's
    W, and + the update, and + the bias (experts, out); return it."""
    assert routing.tiles is not None
    values, num_columns = rows.values.contiguous(), out.shape[1]
    width, num_tiles = values.shape[1], routing.tiles.shape[1]
    low, small, scale = update or (values, weights.values, 1.0)  # pointers that are not read, else
    rank = low.shape[1] if update else 0
    tile = _tile(num_columns, values)
    added = values if bias is None else bias
    computed = len(out) + len(routing.ends) * TILE_ROWS / 2  # of each expert, half a tile is empty
    launch(
        "experts.rows_matmul",
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
        ranks=min(MOST_RANKS, max(16, power_of_two(rank or 1))),
        num_warps=tile.warps,
        num_stages=tile.stages,
        flop=2.0 * computed * num_columns * (width + rank),
    )
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


def weights_matmul(
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
