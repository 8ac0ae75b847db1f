"""Bounds of processor time and memory for work on foreign text: templates and regular expressions,
whose loops and texts no sandbox bounds.

The kernel counts: a timer of processor time, and the limit of the address space. Rendering a short
conversation took 28 µs, the bounds 15 more (on a busy core, 2026-11-23)."""

import os
import resource
import signal
import threading
from functools import cache
from types import FrameType, TracebackType
from typing import NoReturn

# Of one conversation or task item, which takes a millisecond and some kilobytes; rows have at most
# 8 MiB.
MAX_SECONDS = 60.0
MAX_BYTES = 2**30
REPEAT_SECONDS = 1.0  # in case the first signal comes while exceptions are ignored


class ExcessError(RuntimeError):
    """Work that was stopped at a bound, which the message names: `it takes more than ...`."""


class BoundedWork:
    """Stop work in the block after this processor time, or more mapped address space than now
    (None: `MAX_SECONDS`, `MAX_BYTES`); raises `ExcessError`. Not to be nested; outside of the main
    thread time has no bound."""

    def __init__(self, *, max_seconds: float | None = None, max_bytes: int | None = None) -> None:
        self._seconds = MAX_SECONDS if max_seconds is None else max_seconds
        self._bytes = MAX_BYTES if max_bytes is None else max_bytes
        self._is_timed = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        self._limits = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _mapped_bytes() + self._bytes
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
        if self._is_timed:
            if signal.getsignal(signal.SIGPROF) is not _stop:
                signal.signal(signal.SIGPROF, _stop)
            signal.setitimer(signal.ITIMER_PROF, self._seconds, REPEAT_SECONDS)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, self._limits)
        if isinstance(error, MemoryError):
            raise ExcessError(f"takes more than {self._bytes / 2**20:,.0f} MiB of memory") from None
        if isinstance(error, _TimeIsOverError):
            raise ExcessError(
                f"takes more than {self._seconds:g} seconds of processor time"
            ) from None


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
