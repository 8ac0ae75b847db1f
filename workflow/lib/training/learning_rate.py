"""The learning rate by step: a linear warm-up, then a schedule of Transformers."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import get_scheduler

from workflow.lib.settings.config import TrainConfig


def learning_rate(train: TrainConfig, *, step: int, num_steps: int) -> float:
    """Return the learning rate of step `step` (0-based) of `num_steps`. Linear from 0 (exclusive)
    to the peak over ceil(warmup_share * num_steps) steps, then by the schedule, which all but
    `constant` bring to `min_lr_share` of the peak at the step after the last."""
    warmup = _steps(train.warmup_share, num_steps)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    rest = num_steps - warmup
    arguments: dict[str, Any] = {
        "cosine_with_restarts": {"num_cycles": train.lr_cycles},
        "warmup_stable_decay": {"num_decay_steps": min(rest, _steps(train.decay_share, num_steps))},
    }.get(train.lr_schedule, {})
    decay = _decay(train.lr_schedule, rest, **arguments)(step - warmup)
    floor = 1.0 if train.lr_schedule == "constant" else train.min_lr_share
    return train.learning_rate * (floor + (1.0 - floor) * decay)


def _steps(share: float, num_steps: int) -> int:
    return math.ceil(round(share * num_steps, 6))  # 0.07 * 100 is 7.000000000000001


@cache
def _decay(schedule: str, num_steps: int, **arguments: Any) -> Callable[[int], float]:
    """Return the factor by step that Transformers gives a schedule of so many steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(schedule, optimizer, 0, num_steps, arguments)
    factors: list[Callable[[int], float]] = scheduler.lr_lambdas
    return factors[0]
