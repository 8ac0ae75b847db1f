"""Draws of rows and documents: which are held out, and how often an epoch takes each.

Numbers are of 4 bytes, as there may be 10^8 of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.uint32]


def drawn(count: int, *, total: int, seed: int | Sequence[int]) -> Numbers:
    """Return `count` of the numbers below `total`, each at most once, in the order of the draw."""
    order = np.arange(total, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed)).shuffle(order)
    return order[:count].copy()  # a view would keep all of them


def times_taken(documents: int, *, weight: float, source: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return how often an epoch takes each document of a source, shape (documents,). Weight w:
    floor(w) times, and a share of w - floor(w) (rounded, at least one of a source that would lose
    all) once more, drawn by `seed` whatever other sources are."""
    whole, share = int(weight), weight - int(weight)
    more = round(share * documents)
    if whole == 0 and documents:
        more = max(1, more)
    times = np.full(documents, whole, dtype=np.uint8)
    times[drawn(more, total=documents, seed=[seed, source])] += 1
    return times
