"""The verdict on a plan: the one that the search chooses is recorded from the engine and replayed
before it is believed.

What a recording shows corrects the lines that the search is by, and it goes on until it chooses a
plan that was recorded, or none that is worth a recording."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.memory.recorded_peaks import RecordedPeaks
from workflow.lib.planning.memory.replay import Replay, replay
from workflow.lib.planning.preflight.budget import Budget
from workflow.lib.planning.preflight.plan_search import Candidate, choose, is_worth_recording
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import UserError


class NotRecordedError(UserError):
    """A model uses what cannot be run on tensors without values."""


class Recorder(Protocol):
    """Runs plans on tensors without values; raises `NotRecordedError` where it cannot."""

    def peaks(self, plans: Sequence[StepPlan]) -> list[Peaks]:
        """Return the peaks of a process of each plan."""

    def tape(self, plan: StepPlan) -> Tape:
        """Return all that a process of a plan asks of a GPU's allocator."""


def confirmed(
    search: Callable[[], list[Candidate]],
    lines: RecordedPeaks,
    *,
    device: str,
    limits: Budget,
    record: Recorder,
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate whose replay fits, and all candidates with what replays have shown;
    search: finds them, by `lines`. If none fits, the one that needs least, replayed too."""
    known = list[Candidate]()
    while True:
        options = _with_replays(search(), known)
        chosen = choose(options, device=device)
        if chosen.replayed is not None:
            return chosen, options
        if fitting := [candidate for candidate in known if candidate.fits]:
            best = choose(fitting, device=device)
            if not is_worth_recording(chosen, best):
                return best, options
        known.append(recorded(chosen, limits=limits, record=record))
        lines.correct(chosen.plan, known[-1].peaks)


def _with_replays(options: list[Candidate], known: list[Candidate]) -> list[Candidate]:
    """Return the options with the replayed ones in their places, new ones after them."""
    plans = [candidate.plan for candidate in options]
    found = list(options)
    for candidate in known:
        if candidate.plan in plans:
            found[plans.index(candidate.plan)] = candidate
        else:
            found.append(candidate)
    return found


def recorded(candidate: Candidate, *, limits: Budget, record: Recorder) -> Candidate:
    """Return a candidate with its recording and what it lacks by it; CPUs are not replayed."""
    if candidate.plan.device == "cpu":
        (peaks,) = record.peaks([candidate.plan])
        reserved = peaks.allocated_bytes + limits.slack_bytes(peaks.allocated_bytes)
        found, lacking = Replay(peaks, reserved, 0), reserved - limits.capacity_bytes
    else:
        allowed = limits.capacity_bytes - limits.outside_allocator_bytes - limits.margin_bytes
        found = replay(record.tape(candidate.plan), limit_bytes=allowed)
        lacking = found.lacking_bytes or found.reserved_bytes - allowed
    return replace(candidate, peaks=found.peaks, replayed=found, lacking_bytes=lacking)
