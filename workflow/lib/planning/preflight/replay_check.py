"""The verdict on a plan for GPUs: the one that the search's closed form chooses is replayed before
it is believed.

What is replayed is recorded from the engine, or where there is no recorder written by hand. If the
replay shows that the allocator cannot serve it, the next best candidate is tried, and so on. On
CPUs there is no such allocator, and of layers that are not plain none by hand: there the closed
form decides.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.replay import replay_tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.trace_step import step_trace
from workflow.lib.planning.preflight.budget import Budget
from workflow.lib.planning.preflight.plan_search import Candidate, choose
from workflow.lib.system.errors import UserError

logger = logging.getLogger("workflow")

Recorder = Callable[[Setup], Tape]
"""Returns what a process of a plan asks of the allocator, as `recording.recording_process` does; or
raises `NotRecordedError`.
"""


class NotRecordedError(UserError):
    """A model uses what cannot be run on tensors without values."""


def confirmed(
    options: list[Candidate],
    shape: ModelShape,
    *,
    device: str,
    limits: Budget,
    record: Recorder | None = None,
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate whose replay fits, and all candidates with what their replays have
    shown.

    If none fits, the one that needs least, replayed too. A model that is not plain and cannot be
    recorded has no replay.
    """
    while True:
        chosen = choose(options, device=device)
        replays = device != "cpu" and (record is not None or shape.plain)
        if not replays or chosen.replayed is not None:
            return chosen, options
        try:
            tried = replayed(chosen, shape, limits=limits, record=record)
        except NotRecordedError as error:
            if shape.plain:
                raise
            logger.warning("%s; the verdict is an estimate from above", error)
            return chosen, options
        options = [tried if candidate is chosen else candidate for candidate in options]
        if tried.fits:
            return tried, options


def replayed(
    candidate: Candidate, shape: ModelShape, *, limits: Budget, record: Recorder | None = None
) -> Candidate:
    """Return a candidate with its replay, and what it lacks by that."""
    outside = limits.outside_allocator_bytes + limits.margin_bytes
    allowed = limits.capacity_bytes - outside
    tape = record(candidate.setup) if record else step_trace(shape, candidate.setup)
    peaks = replay_tape(tape, limit_bytes=allowed)
    lacking = peaks.lacking_bytes or peaks.reserved_bytes - allowed
    return replace(candidate, replayed=peaks, lacking_bytes=lacking)
