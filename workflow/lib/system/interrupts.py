"""A signal to Snakemake's process alone ends its jobs too, in order.

`kill` or a scheduler sends it so. Snakemake waits for its jobs, and a signal tells it only to start
no more: a training would run to its end. A terminal tells all processes at once; here the jobs are
told in the same way. Those on a cluster Snakemake cancels itself.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

POLL_S = 0.2


def tell_jobs() -> None:
    """Interrupt every job of this process as Ctrl-C does, also those that are just being started.

    Under a shell script's `&` processes ignore that signal; there they are sent SIGTERM.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    number = signal.SIGTERM if ignored else signal.SIGINT
    threading.Thread(target=_tell, args=(os.getpid(), number), daemon=True).start()


def _tell(parent: int, number: signal.Signals) -> None:
    signalled = set[int]()
    while True:
        for pid in set(group_below(parent)) - signalled:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            signalled.add(pid)
        time.sleep(POLL_S)


def group_below(pid: int) -> list[int]:
    """Return the processes below `pid` in its group, as a terminal would tell them.

    The workers of a training are not among them.
    """
    processes = []
    for child in _children(pid):
        with suppress(ProcessLookupError):
            if os.getpgid(child) == os.getpgrp():
                processes += [child, *group_below(child)]
    return processes


def _children(pid: int) -> list[int]:
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended
        return []
    return [int(child) for text in lists for child in text.split()]
