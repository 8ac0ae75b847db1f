"""The verdict on a plan for GPUs: the one that the search's closed form chooses is recorded from
the engine and replayed before it is believed.

If the replay shows that the allocator cannot serve it, the next best candidate is tried, and so on.
CPUs have no such allocator: there the closed form decides, and where nothing can be recorded.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.memory.setup import Setup
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
    *,
    device: str,
    limits: Budget,
    record: Recorder | None = None,
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate whose replay fits, and all candidates with what their replays have
    shown.

    If none fits, the one that needs least, replayed too. Without `record`, and of a model that
    cannot be recorded, there are no replays.
    """
    while True:
        chosen = choose(options, device=device)
        if device == "cpu" or record is None or chosen.replayed is not None:
            return chosen, options
        try:
            tried = replayed(chosen, limits=limits, record=record)
        except NotRecordedError as error:
            logger.warning("%s; the verdict is an estimate by the closed form", error)
            return chosen, options
        options = [tried if candidate is chosen else candidate for candidate in options]
        if tried.fits:
            return tried, options


def replayed(candidate: Candidate, *, limits: Budget, record: Recorder) -> Candidate:
    """Return a candidate with its replay, and what it lacks by that."""
    outside = limits.outside_allocator_bytes + limits.margin_bytes
    allowed = limits.capacity_bytes - outside
    peaks = replay(record(candidate.setup), limit_bytes=allowed)
    lacking = peaks.lacking_bytes or peaks.reserved_bytes - allowed
    return replace(candidate, replayed=peaks, lacking_bytes=lacking)
