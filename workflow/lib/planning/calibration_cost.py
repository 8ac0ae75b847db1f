"""What a calibration of the base costs, and whether `quantize.method: auto` calibrates.

Rounding the columns of all linears and experts, one after the other, takes most of its time on a
GPU. `auto` depends on their number alone, never on the machine: a run that is repeated elsewhere
must not have another base.
"""

import math
from collections.abc import Iterable
from typing import Literal

Method = Literal["absmax", "calibrated"]

# Of a layer of 8B width with 38,912 columns on an H200: 9.5 s (docs/results.md), all else included.
# By PyTorch's loop over columns; with the kernel of `column_rounding` it is an upper bound.
COLUMN_S = 0.25e-3
AFFORDABLE_MIN = 60


def num_columns(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return how many columns weights have: shapes (out, in), or (experts, out, in)."""
    return sum(math.prod(shape[:-2]) * shape[-1] for shape in shapes)


def chosen_method(method: Method | Literal["auto"], *, columns: int) -> tuple[Method, str | None]:
    """Return how a base with so many columns is quantized, and why if it is `auto`."""
    if method != "auto":
        return method, None
    minutes = columns * COLUMN_S / 60
    chosen: Method = "calibrated" if minutes <= AFFORDABLE_MIN else "absmax"
    bound = "at most" if chosen == "calibrated" else "more than"
    return chosen, (
        f"quantize.method: auto; calibration rounds {columns:,} columns, which takes about "
        f"{minutes:.3g} minutes on one H200, {bound} the {AFFORDABLE_MIN} that auto spends"
    )
