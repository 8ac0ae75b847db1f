"""The verdict on a plan: the search's choice is recorded from the engine and replayed.

Each recording corrects the lines of the search, which continues until it chooses a recorded plan,
or none that is worth a recording."""

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
    """A model calls operations that cannot run on tensors without values."""


class Recorder(Protocol):
    """Runs plans on tensors without values; raises `NotRecordedError` if it cannot."""

    def peaks(self, plans: Sequence[StepPlan]) -> list[Peaks]:
        """Return the peaks of a process of each plan."""

    def tape(self, plan: StepPlan) -> Tape:
        """Return all events of a GPU's allocator in a process of a plan."""


def confirmed(
    search: Callable[[], list[Candidate]],
    lines: RecordedPeaks,
    *,
    device: str,
    limits: Budget,
    record: Recorder,
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate whose replay fits, and all candidates, corrected by replays;
    search: finds them, by `lines`. If none fits, the one that needs least, replayed too."""
    replayed = list[Candidate]()
    while True:
        options = _with_replays(search(), replayed)
        chosen = choose(options, device=device)
        if chosen.replayed is not None:
            return chosen, options
        if fitting := [candidate for candidate in replayed if candidate.fits]:
            best = choose(fitting, device=device)
            if not is_worth_recording(chosen, best):
                return best, options
        replayed.append(recorded(chosen, limits=limits, record=record))
        lines.correct(chosen.plan, replayed[-1].peaks)


def _with_replays(options: list[Candidate], replayed: list[Candidate]) -> list[Candidate]:
    """Return the options, with replayed ones in their places, new ones after them."""
    plans = [candidate.plan for candidate in options]
    checked = list(options)
    for candidate in replayed:
        if candidate.plan in plans:
            checked[plans.index(candidate.plan)] = candidate
        else:
            checked.append(candidate)
    return checked


def recorded(candidate: Candidate, *, limits: Budget, record: Recorder) -> Candidate:
    """Return a candidate with its recorded peak and lack; CPUs are not replayed."""
    if candidate.plan.device == "cpu":
        (peaks,) = record.peaks([candidate.plan])
        reserved = peaks.allocated_bytes + limits.slack_bytes(peaks.allocated_bytes)
        replayed, lacking = Replay(peaks, reserved, 0), reserved - limits.capacity_bytes
    else:
        allowed = limits.capacity_bytes - limits.outside_allocator_bytes - limits.margin_bytes
        replayed = replay(record.tape(candidate.plan), limit_bytes=allowed)
        lacking = replayed.lacking_bytes or replayed.reserved_bytes - allowed
    return replace(candidate, peaks=replayed.peaks, replayed=replayed, lacking_bytes=lacking)
