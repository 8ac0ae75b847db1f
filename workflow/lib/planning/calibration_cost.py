"""What a calibration of the base costs, and whether `quantize.method: auto` calibrates.

Columns of a weight are rounded one after the other, and each weight is read many times. `auto`
depends on the model alone, never on the machine: a run that is repeated elsewhere must not have
another base."""

import math
from collections.abc import Sequence
from typing import Literal

Method = Literal["absmax", "calibrated"]
Shape = tuple[int, ...]

# On an H200, from layers of Llama 3 8B and 70B, Qwen3-30B-A3B and gpt-oss-20b: within 18% of each
# (docs/results.md). Forward passes, factorizations and what is measured are in it.
COLUMN_S = 10e-6
WEIGHT_S = 7e-9
AFFORDABLE_MIN = 60


def rounding_seconds(shapes: Sequence[Shape]) -> float:
    """Return how long calibrating takes one H200: shapes (out, in), or (experts, out, in)."""
    columns = sum(math.prod(shape[:-2]) * shape[-1] for shape in shapes)
    return COLUMN_S * columns + WEIGHT_S * sum(map(math.prod, shapes))


def chosen_method(
    method: Method | Literal["auto"], shapes: Sequence[Shape]
) -> tuple[Method, str | None]:
    """Return how a base of such weights is quantized, and why if it is `auto`."""
    if method != "auto":
        return method, None
    minutes = rounding_seconds(shapes) / 60
    chosen: Method = "calibrated" if minutes <= AFFORDABLE_MIN else "absmax"
    bound = "at most" if chosen == "calibrated" else "more than"
    return chosen, (
        f"quantize.method: auto; calibrating {sum(map(math.prod, shapes)):,} weights takes about "
        f"{minutes:.3g} minutes on one H200, {bound} the {AFFORDABLE_MIN} that auto spends"
    )
