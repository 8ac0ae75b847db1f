"""How often each document of several weighted sources is trained on in one epoch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def repeated(
    sources: npt.NDArray[np.int64], *, weights: Sequence[float], seed: int
) -> npt.NDArray[np.int64]:
    """Return the places of the documents of an epoch, ascending; `sources` (documents,) numbers each one's source.

    A weight w takes every document of its source floor(w) times, and a share of w - floor(w) of them
    (rounded, but at least one of a source that would lose all) once more, drawn by `seed` from the source alone: the other
    sources change nothing.
    """
    parts = []
    for number, weight in enumerate(weights):
        places = np.flatnonzero(sources == number)
        whole, share = int(weight), weight - int(weight)
        count = round(share * len(places))
        if whole == 0 and len(places):
            count = max(1, count)
        order = np.random.Generator(np.random.PCG64([seed, number])).permutation(len(places))
        parts += [places] * whole + [places[order[:count]]]
    joined = np.concatenate(parts) if parts else np.array([], dtype=np.int64)
    return np.sort(joined)
