"""Lengths of packed documents, grouped by powers of two, for the work of attention.

Without a window the work grows with squared lengths; of documents longer than a window it grows
with their tokens. So the groups are exact without a window, and with a window of a power of two.
Any other window divides one group, whose mean length decides."""

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workflow.lib.kernels.attention.attention_choice import FLEX_BLOCK


class LengthGroup(NamedTuple):
    """Documents with lengths below a power of two, and at least half of it."""

    below: int  # the power of two
    documents: float
    tokens: float
    squares: float  # sum of the squared lengths, see `grouped`


def document_starts(position_ids: Any) -> Any:
    """Return where documents start (rows, tokens) bool, of an array or a tensor of positions."""
    starts = position_ids == 0
    starts[:, 1:] |= position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def grouped(
    parts: Iterable[npt.NDArray[Any]], seen: Iterable[Any] | None = None
) -> tuple[LengthGroup, ...]:
    """Return the groups of all lengths, the shortest first. parts: some lengths, above 0, each.
    seen: tokens of other documents that each document sees before its own; s of them add 2 s n to
    the square of n."""
    sums = np.zeros((64, 3), dtype=np.int64)
    for lengths, before in zip(parts, seen or repeat(0), strict=False):
        own = lengths.astype(np.int64)
        for power, amounts in enumerate((own**0, own, own * (own + 2 * before))):
            np.add.at(sums[:, power], np.frexp(lengths)[1], amounts)
    return tuple(LengthGroup(1 << x, *row) for x, row in enumerate(sums.tolist()) if row[0])


def equal_lengths(length: float) -> tuple[LengthGroup, ...]:
    """Return the groups of documents that all have `length` tokens."""
    return (LengthGroup(1 << math.frexp(length)[1], 1, length, length * length),)


def are_equal(groups: Sequence[LengthGroup]) -> bool:
    """Whether all documents have one length: n * sum(l^2) = (sum l)^2."""
    _, documents, tokens, squares = map(sum, zip(*groups, strict=True))
    return math.isclose(documents * squares, tokens**2, rel_tol=1e-12)


def computed_keys(
    groups: Sequence[LengthGroup], window: int | None = None, chunk: int | None = None
) -> float:
    """Return the keys that kernels compute on average for a query: the seen ones, and half a block
    on each edge. window: most seen keys, itself included; chunk: tokens of a part of a document,
    which sees no other part."""
    pairs = 0.0
    for _, documents, tokens, squares in groups:
        if chunk and tokens > documents * chunk:
            documents, squares = tokens / chunk, tokens * chunk
        if window and 0 < window < tokens / documents:
            pairs += tokens * (window + FLEX_BLOCK) - documents * window * (window - 1) / 2
        else:
            pairs += (squares + tokens * FLEX_BLOCK) / 2
    return pairs / sum(group.tokens for group in groups)
