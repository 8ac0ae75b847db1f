"""The GPU kernel of `calibrated_rounding.round_columns`, in Triton."""

import triton
import triton.language as tl


@triton.jit
def round_columns(
    codes, lost, part, scale, upper, table, edges,
    num_rows,
    num_columns: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Round `rows` rows, column by column; a column's loss is added to later ones. codes, lost,
    part, scale: (num_rows, num_columns); upper: (num_columns, num_columns). Divisions and products
    round as PyTorch's do, so its loop gives the same codes."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    offsets = row[:, None] * num_columns + column[None, :]
    values = tl.load(part + offsets, mask=inside, other=0.0)
    scales = tl.load(scale + offsets, mask=inside, other=0.0)
    for current in range(num_columns):
        is_current = (column == current)[None, :]
        value = tl.sum(tl.where(is_current, values, 0.0), axis=1)
        column_scale = tl.sum(tl.where(is_current, scales, 0.0), axis=1)
        zero = column_scale == 0.0
        ratio = tl.where(zero, 0.0, tl.div_rn(value, tl.where(zero, 1.0, column_scale)))
        code = tl.zeros((rows,), dtype=tl.int32)
        for edge in range(15):
            code += (tl.load(edges + edge) < ratio).to(tl.int32)
        error = value - tl.load(table + code) * column_scale
        diagonal = tl.load(upper + current * num_columns + current)
        error = tl.div_rn(error, tl.zeros((rows,), dtype=tl.float32) + diagonal)
        later = tl.load(
            upper + current * num_columns + column, mask=column < num_columns, other=0.0
        )
        # the factor is triangular: columns before this one stay as they are
        values -= error[:, None] * later[None, :]
        at = row * num_columns + current
        tl.store(codes + at, code.to(tl.uint8), mask=row < num_rows)
        tl.store(lost + at, error, mask=row < num_rows)
