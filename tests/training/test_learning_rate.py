"""The learning rate of every step, against values computed by hand."""

from typing import get_args

import pytest

from workflow.lib.settings.config import TrainConfig
from workflow.lib.training.optimizers import learning_rate


def rates(num_steps, **settings):
    """Return the learning rate of every step at peak 1."""
    config = TrainConfig(learning_rate=1.0, **settings)
    return [learning_rate(config, step=step, num_steps=num_steps) for step in range(num_steps)]


# Schedule, share of warm-up, floor, and the rates of the steps; half a cosine at 0, 1/4, 1/2, 3/4.
RATES = [
    ("constant", 0.5, 0.0, [1 / 3, 2 / 3, 1, 1, 1, 1]),
    ("constant", 0.0, 0.1, [1, 1, 1]),  # no floor lowers it
    ("linear", 0.2, 0.0, [1, 1, 0.75, 0.5, 0.25]),  # zero one step after the last
    ("linear", 0.2, 0.2, [1, 1, 0.8, 0.6, 0.4]),
    ("cosine", 0.2, 0.0, [1, 1, 0.8535533905932737, 0.5, 0.1464466094067262]),
    ("cosine", 0.0, 0.0, [1]),
    ("cosine", 1.0, 0.0, [0.25, 0.5, 0.75, 1]),  # never decays
    ("cosine_with_restarts", 0.2, 0.1, [1, 1, 0.55, 1, 0.55]),  # two of them in four steps
    ("warmup_stable_decay", 0.2, 0.1, [1, 1, 1, 1, 0.55]),  # the last two of five steps
]
OTHERS = {"cosine_with_restarts": {"lr_cycles": 2}, "warmup_stable_decay": {"decay_share": 0.4}}


@pytest.mark.parametrize(("schedule", "warmup", "floor", "expected"), RATES)
def test_rate_of_every_step_is_that_by_hand(schedule, warmup, floor, expected):
    given = {"lr_schedule": schedule, "warmup_share": warmup, "min_lr_share": floor}
    found = rates(len(expected), **given, **OTHERS.get(schedule, {}))
    assert found == pytest.approx(expected)


def test_warm_up_in_steps_is_the_same_for_any_length():
    for num_steps in (3, 9):
        found = rates(num_steps, lr_schedule="constant", warmup_steps=4)
        assert found == pytest.approx([0.25, 0.5, 0.75, *[1] * 6][:num_steps])


@pytest.mark.parametrize(
    "schedule", [*get_args(TrainConfig.model_fields["lr_schedule"].annotation)]
)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 101])
def test_rate_stays_within_zero_and_peak_and_reaches_the_peak(schedule, num_steps):
    values = rates(num_steps, lr_schedule=schedule, warmup_share=0.03)
    assert min(values) >= 0
    assert max(values) == 1  # 0.03 of any length is at least one step, which ends at the peak


def test_decay_that_is_longer_than_what_the_warm_up_leaves_begins_at_the_peak():
    found = rates(4, lr_schedule="warmup_stable_decay", warmup_share=0.5, decay_share=1.0)
    assert found == pytest.approx([0.5, 1, 1, 0.5])
