"""The verdict on a plan for GPUs: the one that the search's closed form chooses is replayed before
it is believed.

If the replay shows that the allocator cannot serve it, the next best candidate is tried, and so on.
On CPUs there is no such allocator, and of layers that are not plain no replay: there the closed
form decides.
"""

from dataclasses import replace

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.replay import replay
from workflow.lib.planning.preflight.budget import Budget
from workflow.lib.planning.preflight.plan_search import Candidate, choose


def confirmed(
    options: list[Candidate], shape: ModelShape, *, device: str, limits: Budget
) -> tuple[Candidate, list[Candidate]]:
    """Return the best candidate whose replay fits, and all candidates with what their replays have
    shown.

    If none fits, the one that needs least, replayed too.
    """
    while True:
        chosen = choose(options, device=device)
        if device == "cpu" or not shape.plain or chosen.replayed is not None:
            return chosen, options
        tried = replayed(chosen, shape, limits=limits)
        options = [tried if candidate is chosen else candidate for candidate in options]
        if tried.fits:
            return tried, options


def replayed(candidate: Candidate, shape: ModelShape, *, limits: Budget) -> Candidate:
    """Return a candidate with its replay, and what it lacks by that."""
    outside = limits.outside_allocator_bytes + limits.margin_bytes
    allowed = limits.capacity_bytes - outside
    peaks = replay(shape, candidate.setup, limit_bytes=allowed)
    lacking = peaks.lacking_bytes or peaks.reserved_bytes - allowed
    return replace(candidate, replayed=peaks, lacking_bytes=lacking)
