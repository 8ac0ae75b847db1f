"""Bounds of processor time and memory for work on foreign text: templates, regular expressions and
tokenizers, whose loops and texts no sandbox bounds.

Python's own work ends by an exception (`BoundedWork`): the kernel counts, by a timer of processor
time and the limit of the address space. Rendering a short conversation took 28 µs, the bounds 18
more (on a busy core, 2026-11-28).

Signal handlers of Python, and so Ctrl-C, wait until a call of C or Rust returns. So all work enters
itself into shared memory (`WatchedWork`, 2 µs). A watcher, a fork of the stage, compares processor
time and resident memory with the bounds, writes the error, and kills the process. The processes of
a pool are watched too; their parent raises the error (`excess_of_pool`)."""

import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from workflow.lib.system.environment import die_with_parent
from workflow.lib.system.errors import UserError

# Of one conversation or task item, which takes a millisecond and some kilobytes; rows have at most
# 8 MiB.
MAX_SECONDS = 60.0
MAX_BYTES = 2**30
REPEAT_SECONDS = 1.0  # in case the first signal comes while exceptions are ignored
POLL_S = 0.1
RETURN_S = 3.0  # of processor time beyond a bound, for work that Python itself stops
INTERRUPT_S = 3.0  # for an interrupted stage to end by itself
INTERRUPTED = "interrupted; the same command takes up the work again"
MAX_PROCESSES = 4096  # of a pool, and the stage itself
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
ITEM_CHARS = 100  # of a text that a message names

# A process's work: its number (even: none), the bounds of processor seconds and of bytes, and the
# message and item of `WatchedWork`; of an ended one its error.
SLOT = np.dtype(
    [
        ("pid", "<u4"),
        ("number", "<u4"),
        ("seconds", "<f8"),
        ("num_bytes", "<u8"),
        ("ended", "?"),
        ("text", "S2023"),  # with it, an entry has 2,048 bytes
    ]
)
Slots = npt.NDArray[np.void]
"""The shared memory, by process."""


@dataclass
class _Process:
    """This process's place in the shared memory, and the number of its work."""

    slots: Slots
    index: int
    pid: int
    number: int = 0


_process: list[_Process] = []


def _own_entry() -> _Process | None:
    """Return this process's entry; None in a fork that has none, or without a watcher."""
    return _process[0] if _process and _process[0].pid == os.getpid() else None


class WatchedWork:
    """Have work in the block ended after this processor time, or this growth of resident memory.

    message: the error's text, with `{excess}` for `takes more than ...` and `{item}` for the
    beginning of `item`. Work within it counts to it."""

    def __init__(self, message: str, item: str = "", *, seconds: float, num_bytes: int) -> None:
        self._message, self._item = message, item[:ITEM_CHARS]
        self._bounds = seconds, num_bytes
        self._entry: _Process | None = None

    def __enter__(self) -> Self:
        entry = _own_entry()
        if entry is not None and entry.number % 2 == 0:
            self._entry = entry
            entry.number += 1
            text = _encoded(self._message) + self._item.encode(errors="backslashreplace")
            entry.slots[entry.index] = (entry.pid, entry.number, *self._bounds, False, text)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if self._entry is not None:
            self._entry.number += 1
            self._entry.slots["number"][self._entry.index] = self._entry.number
            self._entry = None

    def error(self, excess: str) -> UserError:
        return excess_error(self._message, self._item, excess)


@cache
def _encoded(message: str) -> bytes:
    return message.encode() + b"\0"


def excess_error(message: str, item: str, excess: str) -> UserError:
    """Return the error of the message with this excess, and the beginning of the item."""
    begin = repr(item[:ITEM_CHARS])
    return UserError(message.replace("{excess}", excess, 1).replace("{item}", begin, 1))


def seconds_excess(seconds: float) -> str:
    return f"takes more than {seconds:g} seconds of processor time"


def bytes_excess(num_bytes: int) -> str:
    return f"takes more than {num_bytes / 2**20:,.0f} MiB of memory"


@contextmanager
def watched(report: Callable[[str], None]) -> Iterator[None]:
    """Watch this process's work in the block, from its first instruction on. report: called in the
    watcher with the error, before it kills this process."""
    slots: Slots = np.frombuffer(mmap.mmap(-1, SLOT.itemsize * MAX_PROCESSES), SLOT)
    pid = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    watches, tell = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        _watch(slots, pid, tell, report)
    os.close(tell)
    os.read(watches, 1)
    os.close(watches)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _process[:] = [_Process(slots, 0, pid)]
    try:
        yield
    finally:
        _process.clear()
        os.kill(watcher, signal.SIGKILL)
        os.waitpid(watcher, 0)


def join_watch(index: int) -> None:
    """In process `index` (from 0) of a pool: have its work watched as the stage's."""
    if _process and index + 1 < MAX_PROCESSES:
        slots, pid = _process[0].slots, os.getpid()
        _process[:] = [_Process(slots, index + 1, pid)]
        slots[index + 1] = (pid, 0, 0.0, 0, False, b"")


def excess_of_pool() -> UserError | None:
    """Return the error for which the watcher ended a process of this process's pool."""
    entry = _own_entry()
    for *_, ended, text in _entries(entry.slots, first=1) if entry else ():
        if ended:
            return UserError(text)
    return None


def _entries(slots: Slots, *, first: int) -> Iterator[tuple[int, int, int, float, int, bool, str]]:
    """Yield the index and content of the entries from `first` on."""
    for index in range(first, MAX_PROCESSES):
        pid, *numbers, text = slots[index].item()
        if index and not pid:
            return
        yield index, pid, *numbers, text.decode(errors="replace")


@dataclass(frozen=True)
class _Start:
    """A work as first seen."""

    pid: int
    number: int
    seen_s: float
    processor_s: float
    resident_bytes: int


def _watch(slots: Slots, stage: int, tell: int, report: Callable[[str], None]) -> NoReturn:
    try:
        die_with_parent(stage)
        watcher = _Watcher(slots, stage, report)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        os.write(tell, b"\0")
        watcher.run()
    finally:
        os._exit(0)


class _Watcher:
    """The watcher's process; it ends with the stage."""

    def __init__(self, slots: Slots, stage: int, report: Callable[[str], None]) -> None:
        self._slots, self._stage, self._report = slots, stage, report
        self._interrupted_s: float | None = None
        self._starts: dict[int, _Start] = {}
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)
        for number in ENDING - {signal.SIGINT}:
            signal.signal(number, signal.SIG_IGN)

    def _interrupt(self, *_: object) -> None:
        if self._interrupted_s is None:
            self._interrupted_s = time.monotonic()

    def run(self) -> None:
        while os.getppid() == self._stage:
            for index, pid, number, seconds, num_bytes, _, text in _entries(self._slots, first=0):
                # a process may end meanwhile
                with suppress(OSError):
                    if number % 2 and (excess := self._excess(pid, number, seconds, num_bytes)):
                        message, _, item = text.partition("\0")
                        self._end(index, pid, number, str(excess_error(message, item, excess)))
                    if number % 2 and self._ignores_interrupt(pid):
                        self._end(index, pid, number, INTERRUPTED)
            time.sleep(POLL_S)

    def _excess(self, pid: int, number: int, seconds: float, num_bytes: int) -> str | None:
        start = self._starts.get(pid)
        processor_s = time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)
        resident_bytes = _resident_bytes(pid)
        if start is None or start.number != number:
            now = time.monotonic()
            self._starts[pid] = _Start(pid, number, now, processor_s, resident_bytes)
            return None
        if processor_s - start.processor_s > seconds + RETURN_S:
            return seconds_excess(seconds)
        if resident_bytes - start.resident_bytes > num_bytes:
            return bytes_excess(num_bytes)
        return None

    def _ignores_interrupt(self, pid: int) -> bool:
        """Whether the stage has been in one work since it was interrupted."""
        if self._interrupted_s is None or pid != self._stage:
            return False
        since_s = max(self._interrupted_s, self._starts[pid].seen_s)
        return time.monotonic() - since_s > INTERRUPT_S

    def _end(self, index: int, pid: int, number: int, text: str) -> None:
        if pid == self._stage:
            self._report(text)
        else:
            self._slots[index] = (pid, number + 1, 0.0, 0, True, text.encode())
        os.kill(pid, signal.SIGKILL)


def _resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


_bounded: list["BoundedWork"] = []


class BoundedWork(WatchedWork):
    """Stop work in the block after this processor time, or more mapped address space than now
    (None: `MAX_SECONDS`, `MAX_BYTES`): raises `UserError` with the message, as of `WatchedWork`.
    Work within it counts to it. Outside of the main thread only the watcher counts the time."""

    def __init__(
        self,
        message: str,
        item: str = "",
        *,
        max_seconds: float | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._seconds = MAX_SECONDS if max_seconds is None else max_seconds
        self._bytes = MAX_BYTES if max_bytes is None else max_bytes
        super().__init__(message, item, seconds=self._seconds, num_bytes=self._bytes)
        self._is_timed = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if _bounded:
            return self
        _bounded.append(self)
        super().__enter__()
        self._limits = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _mapped_bytes() + self._bytes
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        if self._is_timed:
            if signal.getsignal(signal.SIGPROF) is not _stop:
                signal.signal(signal.SIGPROF, _stop)
            signal.setitimer(signal.ITIMER_PROF, self._seconds, REPEAT_SECONDS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if _bounded[-1] is not self:
            return
        if self._is_timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, self._limits)
        super().__exit__()
        _bounded.pop()
        if isinstance(error, MemoryError):
            raise self.error(bytes_excess(self._bytes)) from None
        if isinstance(error, _TimeIsOverError):
            raise self.error(seconds_excess(self._seconds)) from None


class _TimeIsOverError(BaseException):
    """Time is over. Not an `Exception`: Jinja takes any of those for a constant without value."""


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise _TimeIsOverError


def _mapped_bytes() -> int:
    pages = int(os.pread(_statm(os.getpid()), 64, 0).split()[0])
    return pages * resource.getpagesize()


@cache
def _statm(_pid: int) -> int:
    """Return the open file of this process's sizes; one opened before a fork reads the parent's."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
