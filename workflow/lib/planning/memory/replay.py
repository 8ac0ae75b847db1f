"""A plan's memory, replayed: its tape (`allocation_tape`) on a model of PyTorch's caching
allocator, with pages that other streams cannot use, pieces too small for requests, and short
overlaps.

Read from c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) with `expandable_segments:True`,
which `launch` sets. A stream has pools of small and large blocks. A request is rounded up to 512
bytes and takes the smallest free block; the rest stays free, and free neighbours become one. Else
the pool's segment grows by pages, which go back only when the GPU has no more."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from workflow.lib.planning.memory.allocation_tape import EMPTY_CACHE, HOST, LOAD, Tape
from workflow.lib.planning.memory.peaks import Peaks, Terms

ROUNDING = 512  # kMinBlockSize
LARGEST_SMALL = 2**20  # kSmallSize: the pool of small blocks serves requests up to this size
SMALL_PAGE, LARGE_PAGE = 2 * 2**20, 20 * 2**20  # kSmallBuffer, kLargeBuffer
ADDRESSES = 2**60  # of a segment; PyTorch reserves more than the GPU's memory


@dataclass(eq=False, slots=True)
class Block:
    """A range of a segment's addresses: in use, free, or without memory."""

    address: int
    size: int
    pool: "_Pool"
    mapped: bool = False
    used: bool = False
    previous: "Block | None" = None
    next: "Block | None" = None


@dataclass(eq=False, slots=True)
class _Pool:
    """The blocks of a stream, small or large ones, in one segment that grows."""

    page: int
    free: list[tuple[int, int]] = field(default_factory=list)
    """Size and address of the free blocks with memory, in this order."""
    at: dict[int, Block] = field(default_factory=dict)
    """All free blocks by address, with or without memory."""

    def __post_init__(self) -> None:
        self.at[0] = Block(0, ADDRESSES, self)

    def add(self, block: Block) -> None:
        self.at[block.address] = block
        if block.mapped:
            insort(self.free, (block.size, block.address))

    def remove(self, block: Block) -> None:
        del self.at[block.address]
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]

    def take_best(self, size: int) -> Block | None:
        """Remove and return the smallest free block for `size`; a growable one counts as grown."""
        free = self.free
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        block = self.at[free[index][1]]
        while _growth(block) and index + 1 < len(free):
            following = self.at[free[index + 1][1]]
            if _room(following) >= _room(block):
                break
            block, index = following, index + 1
        del free[index], self.at[block.address]
        return block


class CachingAllocator:
    """Serves requests; counts bytes in use and taken from the GPU, and both peaks. At a limit it
    first gives free pages back; bytes beyond it are counted as lacking, and served."""

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        """limit_bytes: bound of bytes taken from the GPU (`set_per_process_memory_fraction`)."""
        self._limit = limit_bytes
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = self.lacking = 0

    def allocate(self, num_bytes: int, *, stream: str) -> Block:
        """Return a block for a request of `num_bytes` on a stream."""
        size = rounded(num_bytes)
        small = size <= LARGEST_SMALL
        key = (stream, small)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(SMALL_PAGE if small else LARGE_PAGE)
        block = pool.take_best(size)
        if block is None:
            block = self._grown(pool, size)
            pool.remove(block)
        if block.size > size:
            pool.add(_split(block, size))
        block.used = True
        self.allocated += size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def release(self, block: Block) -> None:
        """Take a block back into its pool."""
        self.allocated -= block.size
        block.used = False
        _give_back(block)

    def empty_cache(self) -> None:
        """Give all whole pages of free blocks back to the GPU."""
        for pool in self._pools.values():
            for _, address in list(pool.free):
                block = pool.at[address]
                start = -(-address // pool.page) * pool.page
                stop = (address + block.size) // pool.page * pool.page
                if start < stop:
                    self._unmap(block, start, stop)

    def _grown(self, pool: _Pool, size: int) -> Block:
        """Return a free block of at least `size` bytes with newly taken pages."""
        segment_bytes = _reserved_bytes(size)
        if self._limit is not None and self.reserved + segment_bytes > self._limit:
            self.empty_cache()
            self.lacking = max(self.lacking, self.reserved + segment_bytes - self._limit)
        block = _first_room(pool, size)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.next is not None
            block = self._map(block.next, min(size - block.size, block.next.size))
        return block

    def _map(self, block: Block, size: int) -> Block:
        """Map pages to the first `size` bytes of a block; return their free block."""
        pool = block.pool
        mapped_bytes = -(-size // pool.page) * pool.page
        pool.remove(block)
        if mapped_bytes < block.size:
            pool.add(_split(block, mapped_bytes))
        block.mapped = True
        self.reserved += block.size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return _give_back(block)

    def _unmap(self, block: Block, start: int, stop: int) -> None:
        pool = block.pool
        pool.remove(block)
        if stop < block.address + block.size:
            pool.add(_split(block, stop - block.address))
        if block.address < start:
            middle = _split(block, start - block.address)
            pool.add(block)
            block = middle
        block.mapped = False
        self.reserved -= block.size
        _give_back(block)


def rounded(num_bytes: int) -> int:
    """Return the allocated bytes of a request."""
    return (-(-num_bytes // ROUNDING) or 1) * ROUNDING


def _reserved_bytes(size: int) -> int:
    """Return a request's bytes at the limit without a free block (get_allocation_size)."""
    if size <= LARGEST_SMALL:
        return SMALL_PAGE
    return LARGE_PAGE if size < LARGE_PAGE // 2 else -(-size // SMALL_PAGE) * SMALL_PAGE


def _growth(block: Block) -> int:
    """Size of the addresses without memory after a block."""
    after = block.next
    return after.size if after is not None and not after.mapped else 0


def _room(block: Block) -> int:
    """Size of a free block and of the addresses it can grow by."""
    return block.size + _growth(block)


def _first_room(pool: _Pool, size: int) -> Block:
    """Return the first block without memory, or the free one before it, for `size` bytes."""
    for address in sorted(a for a, block in pool.at.items() if not block.mapped):
        block = pool.at[address]
        if block.previous is not None and not block.previous.used:
            block = block.previous
        room, step = 0, block
        while room < size and step is not None and not step.used:
            room, step = room + step.size, step.next  # type: ignore[assignment]
        if room >= size:
            return block
    raise AssertionError("the last block of a segment has room for everything")


def _split(block: Block, size: int) -> Block:
    """Cut a block after `size` bytes; return the rest, which is linked but in no list."""
    remainder = Block(
        block.address + size, block.size - size, block.pool, block.mapped, False, block, block.next
    )
    if block.next is not None:
        block.next.previous = remainder
    block.next, block.size = remainder, size
    return remainder


def _give_back(block: Block) -> Block:
    """Put a block on its pool's lists, joined with free neighbours of its kind; return that one."""
    pool, before, after = block.pool, block.previous, block.next
    if before is not None and not before.used and before.mapped == block.mapped:
        pool.remove(before)
        _join(before, block)
        block = before
    if after is not None and not after.used and after.mapped == block.mapped:
        pool.remove(after)
        _join(block, after)
    pool.add(block)
    return block


def _join(block: Block, after: Block) -> None:
    block.size += after.size
    block.next = after.next
    if after.next is not None:
        after.next.previous = block


@dataclass(frozen=True)
class Replay:
    """Peaks of a training process, and bytes that its allocator takes from the GPU."""

    peaks: Peaks
    reserved_bytes: int
    lacking_bytes: int
    """Bytes that the allocator would need beyond its limit, with all free memory given back."""


def replay(tape: Tape, *, limit_bytes: int | None = None) -> Replay:
    """Return the peaks of a tape; limit_bytes: of the allocator, None: without one."""
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
        Peaks(_terms(tape, moments), _host_bytes(tape), tape.work),
        reserved_bytes=allocator.peak_reserved,
        lacking_bytes=allocator.lacking,
    )


def _terms(tape: Tape, moments: dict[str, int]) -> dict[str, Terms]:
    """Return the bytes by term after the event at the peak moment of each phase."""
    wanted = {index: name for name, index in moments.items()}
    terms_by_phase: dict[str, Terms] = {name: {} for name in moments}
    live_terms: Terms = {}
    for index, event in enumerate(tape.events):
        if isinstance(event, int) and tape.streams[tensor := max(event, ~event)] != HOST:
            size = rounded(tape.sizes[tensor])
            term = tape.terms[tensor]
            live_terms[term] = live_terms.get(term, 0) + (size if event >= 0 else -size)
        if index in wanted:
            terms_by_phase[wanted[index]] = {
                term: size for term, size in live_terms.items() if size
            }
    return terms_by_phase


def page_locked(size: int) -> int:
    """Return the host memory that a tensor of so many bytes takes: torch rounds up to a power of
    two, and never frees it."""
    return 1 << (size - 1).bit_length()


def _host_bytes(tape: Tape) -> int:
    """Return the page-locked bytes of a tape."""
    live_bytes = most = 0
    for event in tape.events:
        if isinstance(event, int) and tape.streams[tensor := max(event, ~event)] == HOST:
            size = page_locked(tape.sizes[tensor])
            live_bytes += size if event >= 0 else -size
            most = max(most, live_bytes)
    return most
