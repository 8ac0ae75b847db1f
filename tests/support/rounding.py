"""How far results may be from exact ones, on any processor.

Processors add up in another order, and a model amplifies what that rounds: a bound seen on one
processor is none on the next. So the bound of a family is `FACTOR` times what its stock code loses
in fp32 to itself in fp64, there and then, on the same inputs. Ours lost at most 5.4 times as much
over all families, with AVX2 and without (Mamba 2, whose rounding grows from chunk to chunk), a
plain decoder 2.7 times.

A loss here is a share of a tensor's largest element: small elements are differences of large ones.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

FACTOR = 16.0
# Of two decoder layers in fp32 without a recurrence: their stock code loses up to 7e-6, but next to
# nothing by chance.
PLAIN = 1e-4


def lost(found: torch.Tensor, exact: torch.Tensor) -> float:
    largest = float(exact.abs().max())
    assert largest > 0, "nothing is compared with zeros"
    return float((found.double() - exact.double()).abs().max()) / largest


def allowed(stock: Iterable[float]) -> float:
    """Return what ours may lose where stock code loses so much."""
    return max(PLAIN, FACTOR * max(stock, default=0.0))


def assert_rounded(
    found: Mapping[str, Any], exact: Mapping[str, Any], *, share: float = PLAIN
) -> None:
    """Raise `AssertionError` unless tensors of the same names differ by rounding alone."""
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        # NaN is no loss below any bound
        assert (loss := lost(found[name], tensor)) <= share, f"{name}: {loss:.2g} of the largest"
