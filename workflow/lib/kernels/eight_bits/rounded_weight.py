"""Frozen 16-bit weights in float8, divided by given scales, as they are stored or transposed."""

from functools import partial
from typing import Any

import torch

from workflow.lib.kernels.eight_bits.rounding import FLOAT8, by_kernel_on_gpus
from workflow.lib.kernels.kernel_launch import launch
from workflow.lib.kernels.op import Case, Op, drawn

TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 64, 128, 8
CASE_STACK = (2, 70, 132)  # tiles are cut


def round_weight(
    weight: torch.Tensor, scales: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Return weights (experts, rows, columns) of any strides over the rows' scales (experts, rows)
    fp32, in float8, contiguous; transposed: (experts, columns, rows)."""
    op = weight_columns if transposed else weight_rows
    made: torch.Tensor = by_kernel_on_gpus(op, weight, scales, FLOAT8)
    return made


def _by_kernel(
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


def _by_torch(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, transposed: bool
) -> torch.Tensor:
    values = (weight.float() * scales.reciprocal()[..., None]).to(dtype)
    return (values.mT if transposed else values).contiguous()


def _case(device: torch.device, dtype: torch.dtype) -> Case:
    weight, scales = drawn(device, torch.bfloat16, CASE_STACK, CASE_STACK[:2])
    return weight, scales.float().abs() + 1.0, dtype


def _op(name: str, *, transposed: bool) -> Op[Any, torch.Tensor]:
    return Op(
        name,
        reference=partial(_by_torch, transposed=transposed),
        kernel=partial(_by_kernel, transposed=transposed),
        case=_case,
        variant=lambda *args: (args[-1],),
    )


weight_rows = _op("rows of 16-bit weights in float8", transposed=False)
weight_columns = _op("columns of 16-bit weights in float8", transposed=True)
