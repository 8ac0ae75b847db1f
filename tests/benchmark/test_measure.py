"""How the benchmark's worker times what it measures."""

import time
from collections.abc import Iterator

import pytest
import torch

from workflow.lib.benchmark import measure
from workflow.lib.benchmark.measure import Observed, _time_steps
from workflow.lib.distributed.heartbeat import Pulse
from workflow.lib.training.loop import StepMetrics

PAUSE_S = 0.02
PULSE = Pulse(rank=0, start_s=600.0, step_s=600.0)


def steps() -> Iterator[StepMetrics]:
    """Two steps that seem to have taken no time where they were asked for: the device had begun
    them before.
    """
    for step in (1, 2):
        time.sleep(PAUSE_S)
        yield StepMetrics(
            step=step, loss=1.0, grad_norm=1.0, learning_rate=0.0, trained_tokens=8, tokens=8,
            tokens_per_s=1e9, peak_bytes=0, elapsed_s=0.0,
        )  # fmt: skip


def test_step_lasts_from_the_end_of_the_one_before() -> None:
    seen = Observed()
    began = time.monotonic()
    _time_steps(steps(), seen, PULSE, device=torch.device("cpu"))
    assert len(seen.step_s) == 2
    assert all(seconds >= PAUSE_S for seconds in seen.step_s)
    assert sum(seen.step_s) <= time.monotonic() - began


def test_block_of_steps_has_what_the_device_does_after_the_last_one_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that works on for a while, which only a wait for it shows."""
    waited: list[torch.device] = []

    def wait(device: torch.device) -> None:
        waited.append(device)
        time.sleep(PAUSE_S if len(waited) > 1 else 0.0)

    monkeypatch.setattr(measure, "synchronize", wait)
    seen = Observed()
    _time_steps(steps(), seen, PULSE, device=torch.device("cpu"))
    assert len(waited) == 2
    assert seen.step_s[-1] >= 2 * PAUSE_S
