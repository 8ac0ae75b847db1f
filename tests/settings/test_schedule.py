"""Length and data order of a run, against values computed by hand."""

import numpy as np
import pytest

from workflow.lib.settings.config import TrainConfig
from workflow.lib.settings.schedule import step_rows, total_steps


def train(**settings):
    return TrainConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"),
    [
        (1, 16, 16, 1),
        (1, 17, 16, 2),  # a started batch counts
        (3, 17, 16, 4),  # 51 rows: epochs are not padded one by one
        (0.5, 17, 4, 3),  # 8.5 rows
        (0.001, 17, 16, 1),  # never no step at all
        (2.5, 1009, 13, 195),  # 2522.5 rows
        (2.2, 25, 1, 55),  # 2.2 as written: 55.00000000000001 in binary
    ],
)
def test_length_is_enough_steps_for_the_epochs(epochs, rows, batch, steps):
    assert total_steps(train(epochs=epochs, global_batch_size=batch), num_rows=rows) == steps


def order(num_rows, batch, steps, seed=0):
    parts = [
        step_rows(num_rows=num_rows, global_batch_size=batch, seed=seed, step=step)
        for step in steps
    ]
    return [int(row) for part in parts for row in part]


@pytest.mark.parametrize(("num_rows", "batch"), [(7, 3), (12, 4), (3, 7), (1, 5), (101, 13)])
def test_order_is_that_of_numpys_pcg64_on_seed_and_epoch_from_whichever_step(num_rows, batch):
    """A checkpoint resumed by another version must see the same data: the generator is part of the
    format."""
    draws = [np.random.Generator(np.random.PCG64([5, epoch])) for epoch in range(5)]
    expected = [int(row) for draw in draws for row in draw.permutation(num_rows)]
    steps = len(expected) // batch
    for first in (0, steps // 2):
        found = order(num_rows, batch, range(first, steps), seed=5)
        assert found == expected[first * batch : steps * batch]
