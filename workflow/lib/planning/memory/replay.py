"""The memory of a plan, replayed: what a process asks for (`allocation_tape`) against the
allocator's model (`caching_allocator`).

The closed form adds up what should be there; the replay also knows what lies between:
pages that a stream has taken and another cannot use, pieces that fit nothing, buffers that meet for
a moment. It gives the verdict on one plan.
"""

from dataclasses import dataclass
from itertools import islice

from workflow.lib.planning.memory.allocation_tape import CHECKS, EMPTY_CACHE, LOAD, Tape
from workflow.lib.planning.memory.caching_allocator import Block, CachingAllocator, rounded
from workflow.lib.planning.memory.terms import Terms


@dataclass(frozen=True)
class Replay:
    """Peaks of a process while it trains, bytes."""

    allocated_bytes: int
    reserved_bytes: int
    lacking_bytes: int
    """What the allocator would need beyond its limit, though it gives back all that is free; 0 if
    it can serve everything."""
    peak_phase: str
    terms: Terms
    """What is allocated at the peak."""
    phases: dict[str, int]
    """Peak of what is allocated, by phase."""


def replay(tape: Tape, *, limit_bytes: int | None = None) -> Replay:
    """Return the peaks of a tape's events with an allocator that may take `limit_bytes` from the
    GPU, or any number.
    """
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    blocks: dict[int, Block] = {}
    phases, phase, moment = {LOAD: 0}, LOAD, 0
    for index, event in enumerate(tape.events):
        if event == EMPTY_CACHE:
            allocator.empty_cache()
        elif isinstance(event, str):
            phase = event
            phases.setdefault(phase, 0)
        elif event < 0:
            allocator.release(blocks.pop(~event))
        else:
            blocks[event] = allocator.allocate(tape.sizes[event], stream=tape.streams[event])
            if allocator.allocated > phases[phase]:
                phases[phase] = allocator.allocated
                if allocator.allocated == allocator.peak_allocated:
                    moment = index
    return Replay(
        allocated_bytes=allocator.peak_allocated,
        reserved_bytes=allocator.peak_reserved,
        lacking_bytes=allocator.lacking,
        peak_phase=max(phases, key=phases.__getitem__),
        terms=_terms(tape, moment),
        phases={name: size for name, size in phases.items() if name not in (LOAD, CHECKS)},
    )


def _terms(tape: Tape, moment: int) -> Terms:
    """Return the bytes by term after the event at `moment`."""
    past = {event for event in islice(tape.events, moment + 1) if isinstance(event, int)}
    terms: Terms = {}
    for tensor in past:
        if tensor >= 0 and ~tensor not in past:
            term = tape.terms[tensor]
            terms[term] = terms.get(term, 0) + rounded(tape.sizes[tensor])
    return terms
