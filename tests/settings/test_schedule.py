"""Length, learning rate and data order of a run, against values computed by hand."""

import math

import numpy as np
import pytest

from workflow.lib.settings.config import TrainConfig
from workflow.lib.settings.schedule import learning_rate, step_rows, total_steps


def train(**settings: object) -> TrainConfig:
    return TrainConfig.model_validate(settings)


def rates(num_steps: int, **settings: object) -> list[float]:
    """Return the learning rate of every step at peak 1."""
    config = train(learning_rate=1.0, **settings)
    return [learning_rate(config, step=step, num_steps=num_steps) for step in range(num_steps)]


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"),
    [
        (1, 16, 16, 1),
        (1, 17, 16, 2),  # a started batch counts
        (3, 17, 16, 4),  # 51 rows: epochs are not padded one by one
        (0.5, 17, 4, 3),  # 8.5 rows
        (0.001, 17, 16, 1),  # never no step at all
        (2.5, 1009, 13, 195),  # 2522.5 rows
    ],
)
def test_length_is_enough_steps_for_the_epochs(
    epochs: float, rows: int, batch: int, steps: int
) -> None:
    assert total_steps(train(epochs=epochs, global_batch_size=batch), num_rows=rows) == steps


def test_max_steps_is_the_length_whatever_the_rows() -> None:
    assert total_steps(train(epochs=None, max_steps=7), num_rows=3) == 7


def test_constant_rate_follows_a_linear_warm_up() -> None:
    assert rates(6, lr_schedule="constant", warmup_share=0.5) == pytest.approx(
        [1 / 3, 2 / 3, 1, 1, 1, 1]
    )


def test_linear_rate_would_reach_zero_one_step_after_the_last() -> None:
    assert rates(5, lr_schedule="linear", warmup_share=0.2) == pytest.approx(
        [1, 1, 0.75, 0.5, 0.25]
    )


def test_linear_rate_falls_towards_the_floor() -> None:
    assert rates(5, lr_schedule="linear", warmup_share=0.2, min_lr_share=0.2) == pytest.approx(
        [1, 1, 0.8, 0.6, 0.4]
    )


def test_a_single_step_trains_at_the_peak() -> None:
    assert rates(1, lr_schedule="cosine", warmup_share=0.0) == [1.0]


def test_warm_up_of_seven_of_a_hundred_steps_ends_at_the_seventh() -> None:
    assert rates(100, warmup_share=0.07).index(1.0) == 6


def test_cosine_rate_is_half_the_peak_in_the_middle_of_the_decay() -> None:
    # progress 0, 1/4, 1/2, 3/4 of half a cosine
    assert rates(5, lr_schedule="cosine", warmup_share=0.2) == pytest.approx(
        [1, 1, 0.8535533905932737, 0.5, 0.1464466094067262]
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 101])
def test_rate_stays_within_zero_and_peak_and_reaches_the_peak(
    schedule: str, num_steps: int
) -> None:
    values = rates(num_steps, lr_schedule=schedule, warmup_share=0.03)
    assert min(values) >= 0
    assert max(values) == 1  # 0.03 of any length is at least one step, which ends at the peak


def test_warm_up_share_of_one_never_decays() -> None:
    assert rates(4, warmup_share=1.0) == pytest.approx([0.25, 0.5, 0.75, 1])


def test_min_lr_share_does_not_lower_a_constant_rate() -> None:
    assert rates(3, lr_schedule="constant", warmup_share=0, min_lr_share=0.1) == [1, 1, 1]


def order(num_rows: int, batch: int, steps: range, seed: int = 0) -> list[int]:
    parts = [
        step_rows(num_rows=num_rows, global_batch_size=batch, seed=seed, step=step)
        for step in steps
    ]
    return [int(row) for part in parts for row in part]


@pytest.mark.parametrize(("num_rows", "batch"), [(7, 3), (12, 4), (3, 7), (1, 5), (101, 13)])
def test_each_epoch_visits_each_row_once(num_rows: int, batch: int) -> None:
    rows = order(num_rows, batch, range(math.ceil(5 * num_rows / batch)))
    for epoch in range(5):
        assert sorted(rows[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_rows_of_a_resumed_run_are_those_of_the_uninterrupted_one() -> None:
    whole = order(11, 4, range(9))
    assert order(11, 4, range(5, 9)) == whole[20:]


def test_order_of_rows_does_not_depend_on_the_batch_size() -> None:
    assert order(11, 4, range(3)) == order(11, 3, range(4)) == order(11, 12, range(1))


def test_epochs_have_different_orders() -> None:
    rows = order(101, 101, range(2))
    assert rows[:101] != rows[101:]


def test_seed_changes_the_order() -> None:
    assert order(101, 101, range(1), seed=0) != order(101, 101, range(1), seed=1)


def test_rows_are_indices_of_the_batch_size() -> None:
    rows = step_rows(num_rows=7, global_batch_size=5, seed=0, step=3)
    assert rows.shape == (5,)
    assert rows.dtype == np.int64


def test_order_is_that_of_numpys_pcg64_on_seed_and_epoch() -> None:
    """A checkpoint resumed by another version must see the same data: the generator is part of the
    format.
    """
    expected = np.random.Generator(np.random.PCG64([5, 1])).permutation(7)
    assert order(7, 7, range(1, 2), seed=5) == list(expected)
