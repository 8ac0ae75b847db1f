"""Bootstrap over documents or items: 95% percentile intervals of ratios of sums, and of paired
differences (Efron and Tibshirani 1993, ch. 13).

Whole documents are resampled, as their tokens are not independent. Base and tuned see the same
documents, so a difference resamples as one numerator: what both share cancels."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
CHUNK_ENTRIES = 2**22  # resampled indices held at a time: 32 MiB


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums, its 95% interval, and the two-sided p-value of the ratio being 0; of a
    single unit the ratio alone."""

    value: float
    ci95: tuple[float, float] | None = None
    p_value: float | None = None


def estimate_ratio(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, resamples: int, seed: int
) -> Estimate:
    """Estimate sum(numerators) / sum(denominators) over independent units, at least one, with
    positive denominators. p: twice the smaller share of resamples on a side of 0, counting the
    sample itself."""
    tops = np.asarray(numerators, dtype=np.float64)
    bottoms = np.asarray(denominators, dtype=np.float64)
    assert tops.shape == bottoms.shape, f"{tops.shape} against {bottoms.shape}"
    assert len(tops) >= 1, "nothing was measured"
    assert (bottoms > 0).all(), "denominators must be positive"
    value = float(tops.sum() / bottoms.sum())
    if len(tops) == 1:
        return Estimate(value)
    ratios = _resampled_ratios(tops, bottoms, resamples=resamples, seed=seed)
    low, high = (float(edge) for edge in np.quantile(ratios, [0.025, 0.975]))
    tail = min(int((ratios <= 0).sum()), int((ratios >= 0).sum()))
    return Estimate(value, (low, high), p_value=min(1.0, 2 * (tail + 1) / (resamples + 1)))


def _resampled_ratios(tops: Floats, bottoms: Floats, *, resamples: int, seed: int) -> Floats:
    """Return the ratio of each resample, shape (resamples,)."""
    generator = np.random.Generator(np.random.PCG64(seed))
    units = len(tops)
    at_once = max(1, CHUNK_ENTRIES // units)
    ratios = np.empty(resamples, dtype=np.float64)
    for first in range(0, resamples, at_once):
        count = min(at_once, resamples - first)
        drawn = generator.integers(0, units, size=(count, units))
        ratios[first : first + count] = tops[drawn].sum(axis=1) / bottoms[drawn].sum(axis=1)
    return ratios
