"""The search for the fastest plan that fits: every micro-batch size with every level of recomputation that is left open.

Each candidate is predicted in closed form, its bytes by `memory` and its seconds by `duration`. More recomputation
saves memory and costs time; the memory that it saves allows larger micro-batches, which save time. Which of the
two wins depends on shapes and memory, so all are tried: at most a few hundred, in milliseconds.
"""

from dataclasses import dataclass, replace
from itertools import product

from workflow.lib import memory
from workflow.lib.duration import cpu_seconds, gpu_seconds, micro_batch_work
from workflow.lib.gpus import BY_NAME
from workflow.lib.memory import GIB, Prediction
from workflow.lib.memory_terms import Setup
from workflow.lib.planner import Budget, Machine
from workflow.lib.replay import Replay
from workflow.lib.shapes import ModelShape

# Larger micro-batches bring a CPU nothing: its products are full at a few hundred rows.
LARGEST_CPU_MICRO_BATCH = 8
# `auto`: none, every 8th to every 2nd layer, all. Finer steps differ by less than what the prediction is off.
LEVELS: tuple[bool | int, ...] = (False, 8, 4, 3, 2, True)
# A GPU that no table knows is ranked as if it were this one; only the order of the candidates depends on it.
STAND_IN = "NVIDIA A100-SXM4-80GB"

VERDICTS_OF_CHOSEN = ("chosen", "needs least, does not fit")


@dataclass(frozen=True)
class Candidate:
    """A micro-batch size and a level of recomputation, what they take, and the predicted seconds of a step."""

    setup: Setup
    prediction: Prediction
    lacking_bytes: int
    """How much more than there is a process would need; 0 or less if it fits."""
    step_s: float
    replayed: Replay | None = None
    """The peaks of its replay, where it was replayed (`verdict`); `lacking_bytes` is by these then."""

    @property
    def micro_batch_size(self) -> int:
        """Rows per process and forward pass."""
        return self.setup.micro_batch_size

    @property
    def fits(self) -> bool:
        """Whether the predicted peak fits with slack and margin."""
        return self.lacking_bytes <= 0

    @property
    def recomputation(self) -> str:
        """The level in words."""
        every = int(self.setup.activation_checkpointing)
        return {0: "none", 1: "every layer"}.get(every, f"1 of {every} layers")


def checkpointing_levels(wanted: bool | int | str) -> list[bool | int]:
    """Return the levels of recomputation to consider: the one that is set, or all for `auto`."""
    return [int(wanted) if type(wanted) is int else bool(wanted)] if wanted != "auto" else [*LEVELS]


def candidates(
    shape: ModelShape,
    setup: Setup,
    machine: Machine,
    *,
    sizes: list[int],
    levels: list[bool | int],
    rows: int,
    trained_share: float,
    limits: Budget,
) -> list[Candidate]:
    """Predict every micro-batch size at every level, for `rows` rows per process and step."""
    return [
        _candidate(
            shape,
            replace(
                setup,
                micro_batch_size=size,
                accumulates=size < rows,
                activation_checkpointing=level,
            ),
            machine,
            rows=rows,
            trained_share=trained_share,
            limits=limits,
        )
        for size, level in product(sizes, levels)
    ]


def _candidate(
    shape: ModelShape,
    setup: Setup,
    machine: Machine,
    *,
    rows: int,
    trained_share: float,
    limits: Budget,
) -> Candidate:
    prediction = memory.predict(shape, setup)
    work = micro_batch_work(shape, setup, trained_share=trained_share)
    gpus = [BY_NAME.get(name, BY_NAME[STAND_IN]) for name in machine.gpu_names]
    micro_s = max((gpu_seconds(work, gpu) for gpu in gpus), default=cpu_seconds(work))
    lacking = limits.needed_bytes(prediction.peak_bytes) - limits.capacity_bytes
    return Candidate(setup, prediction, lacking, micro_s * rows / setup.micro_batch_size)


def choose(found: list[Candidate], *, device: str) -> Candidate:
    """Return the fastest candidate that fits, of equally fast ones the one with most rows; the smallest one if none fits.

    On the CPU micro-batches have at most 8 rows, if there are such candidates: larger ones gain nothing.
    """
    small = [c for c in found if c.micro_batch_size <= LARGEST_CPU_MICRO_BATCH]
    allowed = small if device == "cpu" and small else found
    fitting = [candidate for candidate in allowed if candidate.fits]
    if not fitting:
        return min(found, key=lambda c: c.prediction.peak_bytes)
    return min(fitting, key=lambda c: (float(f"{c.step_s:.6g}"), -c.micro_batch_size))


def explain(candidate: Candidate, chosen: Candidate) -> str:
    """Return in a few words why a candidate was chosen or not."""
    if candidate == chosen:
        return VERDICTS_OF_CHOSEN[0 if candidate.fits else 1]
    if not candidate.fits:
        method = ", replayed" if candidate.replayed else ""
        return f"{candidate.lacking_bytes / GIB:.2f} GiB too much{method}"
    return f"{100 * (candidate.step_s / chosen.step_s - 1):.1f}% slower"
