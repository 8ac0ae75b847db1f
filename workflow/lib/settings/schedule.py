"""The course of a run as pure functions of the step: its length and its rows.

Rows: epoch e visits all rows in the order of a permutation drawn from (seed, e); step s takes the
next `global_batch_size` entries of the concatenation of these permutations. Resuming at step s
therefore needs no iterator state, and the number of processes changes nothing."""

import functools
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from workflow.lib.settings.config import TrainConfig


def total_steps(train: TrainConfig, *, num_rows: int) -> int:
    """Return the number of steps: `max_steps`, or `epochs` passes over `num_rows` rows."""
    if train.max_steps is not None:
        return train.max_steps
    assert train.epochs is not None, "TrainConfig guarantees epochs or max_steps"
    epochs = Fraction(repr(train.epochs))  # the decimal of the settings, not its binary value
    return max(1, math.ceil(num_rows * epochs / train.global_batch_size))


def step_rows(
    *, num_rows: int, global_batch_size: int, seed: int, step: int
) -> npt.NDArray[np.int64]:
    """Return the row numbers of step `step` (0-based), shape (global_batch_size,)."""
    first = step * global_batch_size
    positions = np.arange(first, first + global_batch_size)
    epochs = positions // num_rows
    orders = {int(e): _permutation(num_rows, seed=seed, epoch=int(e)) for e in np.unique(epochs)}
    return np.array(
        [orders[int(e)][p % num_rows] for e, p in zip(epochs, positions, strict=True)],
        dtype=np.int64,
    )


@functools.lru_cache(maxsize=2)
def _permutation(num_rows: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)
