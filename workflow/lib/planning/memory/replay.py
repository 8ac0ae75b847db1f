"""The memory of a plan, replayed: what a process asks for (`allocation_tape`) against the
allocator's model (`caching_allocator`).

A replay knows what a sum of tensors does not: pages that a stream has taken and another cannot use,
pieces that fit nothing, buffers that meet for a moment. It gives the verdict on one plan."""

from dataclasses import dataclass

from workflow.lib.planning.memory.allocation_tape import EMPTY_CACHE, HOST, LOAD, Tape
from workflow.lib.planning.memory.caching_allocator import Block, CachingAllocator, rounded
from workflow.lib.planning.memory.peaks import Peaks, Terms


@dataclass(frozen=True)
class Replay:
    """Peaks of a process while it trains, and what its allocator takes from the GPU; bytes."""

    peaks: Peaks
    reserved_bytes: int
    lacking_bytes: int
    """What the allocator would need beyond its limit with all free memory given back."""

    @property
    def allocated_bytes(self) -> int:
        """The peak of what is allocated."""
        return self.peaks.allocated_bytes


def replay(tape: Tape, *, limit_bytes: int | None = None) -> Replay:
    """Return the peaks of a tape with an allocator that may take `limit_bytes`, or any number."""
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    blocks: dict[int, Block] = {}
    peaks, moments, phase = {LOAD: 0}, {LOAD: 0}, LOAD
    for index, event in enumerate(tape.events):
        if event == EMPTY_CACHE:
            allocator.empty_cache()
        elif isinstance(event, str):
            phase = event
            peaks.setdefault(phase, 0)
        elif tape.streams[max(event, ~event)] == HOST:
            continue
        elif event < 0:
            allocator.release(blocks.pop(~event))
        else:
            blocks[event] = allocator.allocate(tape.sizes[event], stream=tape.streams[event])
            if allocator.allocated > peaks[phase]:
                peaks[phase], moments[phase] = allocator.allocated, index
    return Replay(
        Peaks(_terms(tape, moments), _host_bytes(tape)),
        reserved_bytes=allocator.peak_reserved,
        lacking_bytes=allocator.lacking,
    )


def _terms(tape: Tape, moments: dict[str, int]) -> dict[str, Terms]:
    """Return the bytes by term behind the event at the moment of each phase."""
    wanted = {index: name for name, index in moments.items()}
    found: dict[str, Terms] = {name: {} for name in moments}
    there: Terms = {}
    for index, event in enumerate(tape.events):
        if isinstance(event, int) and tape.streams[tensor := max(event, ~event)] != HOST:
            size = rounded(tape.sizes[tensor])
            term = tape.terms[tensor]
            there[term] = there.get(term, 0) + (size if event >= 0 else -size)
        if index in wanted:
            found[wanted[index]] = {term: size for term, size in there.items() if size}
    return found


def _host_bytes(tape: Tape) -> int:
    """Return the page-locked bytes of a tape: rounded to powers of two, and never freed."""
    there = most = 0
    for event in tape.events:
        if isinstance(event, int) and tape.streams[tensor := max(event, ~event)] == HOST:
            size = 1 << (tape.sizes[tensor] - 1).bit_length()
            there += size if event >= 0 else -size
            most = max(most, there)
    return most
