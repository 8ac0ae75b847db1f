"""Order of the end after SIGINT or SIGTERM to Snakemake's process alone: its jobs end too. And the
stop of a training on request (`StopRequest`), by which all processes end between two steps.

`kill` or a scheduler sends it so. Snakemake waits for its jobs, and after a signal only starts no
more: a training would run to its end. A terminal signals all processes at once; here the jobs get
the same signal. Snakemake itself cancels jobs on a cluster, which sends SIGTERM or
SIGUSR1 before it takes a machine back; SIGHUP is a lost terminal."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

from workflow.lib.system.limits import INTERRUPTED

POLL_S = 0.2
_ENDING = list[int]()


def end_at_signals() -> None:
    """End the process at once, while Snakemake reads the Snakefile or builds the graph: an
    exception in its event loop would be a traceback. Nothing is written by then."""
    _catch(_end_at_once)


def end_with_jobs(*, jobs_run_here: bool) -> None:
    """Once Snakemake schedules jobs: end it and, if they run here, its jobs."""
    _catch(partial(_end_with_jobs, jobs_run_here))


def is_ending() -> bool:
    """Return whether a signal ends the jobs."""
    return bool(_ENDING)


def _catch(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle both signals by `handler`, unless they are ignored."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    sys.stdout.flush()
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(1)


def _end_with_jobs(jobs_run_here: bool, number: int, frame: FrameType | None) -> None:
    if not _ENDING:
        _ENDING.append(number)
        if jobs_run_here:
            interrupt_jobs()
        raise SystemExit(INTERRUPTED)  # Snakemake catches it, and waits for the jobs


def interrupt_jobs() -> None:
    """Interrupt every job of this process as Ctrl-C does, also jobs that are being started. Under a
    shell script's `&` processes ignore that signal; there they get SIGTERM."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    number = signal.SIGTERM if ignored else signal.SIGINT
    threading.Thread(target=_signal_jobs, args=(os.getpid(), number), daemon=True).start()


def _signal_jobs(parent: int, number: signal.Signals) -> None:
    signalled = set[int]()
    while True:
        for pid in set(group_below(parent)) - signalled:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            signalled.add(pid)
        time.sleep(POLL_S)


def end_stages(stages: Iterable[str]) -> bool:
    """Terminate the jobs of this process that run one of these stages; return whether there are
    some. Not by SIGINT: Python shows a traceback for it until a stage handles it."""
    programs = {f"workflow.scripts.{stage}" for stage in stages}
    has_ended = False
    for pid in group_below(os.getpid()):
        with suppress(OSError):  # it has ended
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            if any(program in command for program in programs):
                os.kill(pid, signal.SIGTERM)
                has_ended = True
    return has_ended


def group_below(pid: int) -> list[int]:
    """Return the processes below `pid` in its group, as for a terminal; no workers."""
    processes = []
    for child in children_of(pid):
        with suppress(ProcessLookupError):
            if os.getpgid(child) == os.getpgrp():
                processes += [child, *group_below(child)]
    return processes


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's descendants; none once it has ended."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return []
    return [int(child) for text in lists for child in text.split()]


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequest:
    """Context manager: within it `SIGNALS` only set `asked`, on this process. A signal that is
    ignored (SIGHUP under `nohup`) stays ignored."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        wanted = (number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN)
        self._previous = {number: signal.signal(number, self._ask) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # Only a flag, which all processes exchange between two steps: an exception here would leave
        # the others waiting in their next collective.
        self.requested = True
