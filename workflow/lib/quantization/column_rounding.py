"""Columns of a weight rounded one after the other, each with the errors of those before it.

Rows do not depend on each other. On a GPU one kernel takes a few rows through all of the columns;
without it every column is a dozen launches, which took most of a calibration's time.
"""

import torch

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.quantization.nf4_codes import code_edges, code_table, nearest_codes

PROGRAM_ROWS = 4

if kernels.INSTALLED:
    from workflow.lib.kernels.triton_code import rounding as triton_rounding


def round_columns(
    part: torch.Tensor, scale: torch.Tensor, upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (out, columns) uint8, and by how much each column is off, divided by its
    diagonal element of `upper`, fp32. part: (out, columns), which may be overwritten; scale: of
    every weight; upper: (columns, columns), upper triangular. All are fp32."""
    if kernels.usable(part.device):
        return columns_by_kernel(part, scale, upper)
    return columns_by_loop(part, scale, upper)


def columns_by_loop(
    part: torch.Tensor, scale: torch.Tensor, upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    edges = code_edges(table := code_table(part.device))
    errors, codes = torch.empty_like(part), torch.empty_like(part, dtype=torch.uint8)
    for column in range(part.shape[1]):
        code = nearest_codes(part[:, column], scale[:, column], edges)
        lost = (part[:, column] - table[code] * scale[:, column]) / upper[column, column]
        part[:, column:] -= torch.outer(lost, upper[column, column:])
        codes[:, column], errors[:, column] = code, lost
    return codes, errors


def columns_by_kernel(
    part: torch.Tensor, scale: torch.Tensor, upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    table = code_table(part.device)
    num_rows, num_columns = part.shape
    codes = torch.empty(part.shape, dtype=torch.uint8, device=part.device)
    errors = torch.empty(part.shape, dtype=torch.float32, device=part.device)
    triton_rounding.round_columns[(-(-num_rows // PROGRAM_ROWS),)](
        codes,
        errors,
        *(x.contiguous() for x in (part, scale, upper)),
        table,
        code_edges(table),
        num_rows,
        num_columns=num_columns,
        rows=PROGRAM_ROWS,
        columns=1 << (num_columns - 1).bit_length(),
        num_warps=1,
        # a product and a sum in one operation would be rounded once, PyTorch's loop rounds twice
        enable_fp_fusion=False,
    )
    return codes, errors
