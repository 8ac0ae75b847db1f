"""Where the time of a training goes, beside what was predicted of it.

Predicted are steps alone, which never wait for data. Held-out losses and checkpoints come between
steps."""

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from workflow.lib.model.micro_batch import MicroBatch
from workflow.lib.system.number_formats import duration

STEPS_SEEN = 10  # the first of a start, of which one compiles and captures
FAR_OFF = 0.10  # of a predicted time, what is told
STEPS, DATA, HELDOUT, CHECKPOINTS = (
    "steps", "waiting for data", "held-out losses", "checkpoints"
)  # fmt: skip


@dataclass
class TimeWatch:
    """Seconds of one start of a run. predicted_s: of a step, None where the speed is not known;
    every: steps between what comes between them, as far as that is set."""

    predicted_s: float | None
    num_steps: int
    every: Mapping[str, int | None]
    steps_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note the block's seconds as those of a part."""
        began = time.monotonic()
        yield
        self.parts_s.setdefault(name, []).append(time.monotonic() - began)

    def waited(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the same, and note how long each is waited for."""
        while True:
            with self.part(DATA):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @property
    def step_s(self) -> float:
        """Median seconds of a step, the first one left out."""
        return statistics.median(self.steps_s[1:] or self.steps_s)

    def after_step(self, seconds: float, *, step: int) -> str | None:
        """Note a step of so many seconds; after ten, return by how much the forecast is off, once,
        or None for at most 10%. step: counts from 1, over all starts."""
        self.steps_s.append(seconds)
        if len(self.steps_s) != STEPS_SEEN or self.predicted_s is None:
            return None
        waited_s = sum(self.parts_s.get(DATA, ())) / STEPS_SEEN
        more_s = {STEPS: self.step_s - waited_s - self.predicted_s, DATA: waited_s}
        for name, steps in self.every.items():
            if steps is not None and name in self.parts_s:
                more_s[name] = statistics.mean(self.parts_s[name]) / steps
        each_s = self.predicted_s + sum(more_s.values())
        off = each_s / self.predicted_s - 1
        if abs(off) <= FAR_OFF:
            return None
        worst = max(more_s, key=lambda name: abs(more_s[name]))
        left_s = (self.num_steps - step) * each_s
        return (
            f"the forecast of time was off: {STEPS_SEEN} steps show {each_s:.3g} s a step, "
            f"{self.predicted_s:.3g} s were predicted ({off:+.0%}); most of it is {worst} "
            f"({more_s[worst]:+.2g} s a step). Corrected: {duration(left_s)} left"
        )

    def document(self) -> dict[str, Any]:
        """Return what `summary.json` says of it."""
        parts = {name: sum(seconds) for name, seconds in self.parts_s.items()}
        steps_s = sum(self.steps_s) - parts.get(DATA, 0.0)
        measured_s = self.step_s if self.steps_s else None
        return {
            "predicted_step_s": self.predicted_s,
            "measured_step_s": measured_s,
            "parts_s": {STEPS: steps_s} | parts,
        }
