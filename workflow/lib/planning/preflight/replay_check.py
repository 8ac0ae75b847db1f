"""The verdict on a plan for GPUs: the one that the search chooses is recorded from the engine and
replayed before it is believed.

What a replay allocates, as a share of what the closed form says, corrects the search's other
candidates, and it goes on until it chooses one that was replayed, or none that is worth a
recording. CPUs have no such allocator: there the closed form decides, and where nothing can be
recorded.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.preflight.budget import Budget
from workflow.lib.planning.preflight.plan_search import (
    Candidate,
    choose,
    is_worth_recording,
)
from workflow.lib.planning.preflight.recorded_shares import RecordedShares
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError

logger = logging.getLogger("workflow")

Recorder = Callable[[StepPlan], Tape]
"""Returns what a process of a plan asks of the allocator, as `recording.recording_process` does; or
raises `NotRecordedError`.
"""


class NotRecordedError(UserError):
    """A model uses what cannot be run on tensors without values."""


def confirmed(
    search: Callable[[RecordedShares], list[Candidate]],
    *,
    device: str,
    limits: Budget,
    record: Recorder | None = None,
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate whose replay fits, and all candidates with what replays have shown;
    search: finds them, by what was recorded so far.

    If none fits, the one that needs least, replayed too. Without `record`, and of a model that
    cannot be recorded, there are no replays.
    """
    shares, known = RecordedShares(), list[Candidate]()
    while True:
        options = _with_replays(search(shares), known)
        chosen = choose(options, device=device)
        if device == "cpu" or record is None or chosen.replayed is not None:
            return chosen, options
        if fitting := [candidate for candidate in known if candidate.fits]:
            best = choose(fitting, device=device)
            if not is_worth_recording(chosen, best):
                return best, options
        try:
            known.append(replayed(chosen, limits=limits, record=record))
        except NotRecordedError as error:
            logger.warning("%s; the verdict is an estimate by the closed form", error)
            return chosen, options
        shares = shares.with_recorded(chosen.plan, _share(known[-1]))


def _with_replays(options: list[Candidate], known: list[Candidate]) -> list[Candidate]:
    """Return the options with those that were replayed in their places, or after them where the
    search has come to others.
    """
    plans = [candidate.plan for candidate in options]
    found = list(options)
    for candidate in known:
        if candidate.plan in plans:
            found[plans.index(candidate.plan)] = candidate
        else:
            found.append(candidate)
    return found


def _share(candidate: Candidate) -> float:
    assert candidate.replayed is not None
    return candidate.replayed.allocated_bytes / candidate.prediction.peak_bytes


def replayed(candidate: Candidate, *, limits: Budget, record: Recorder) -> Candidate:
    """Return a candidate with its replay, and what it takes and lacks by that."""
    outside = limits.outside_allocator_bytes + limits.margin_bytes
    allowed = limits.capacity_bytes - outside
    peaks = replay(record(candidate.plan), limit_bytes=allowed)
    lacking = peaks.lacking_bytes or peaks.reserved_bytes - allowed
    return replace(
        candidate, replayed=peaks, peak_bytes=peaks.allocated_bytes, lacking_bytes=lacking
    )
