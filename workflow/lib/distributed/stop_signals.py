"""Stopping a run on request: all processes together act on a signal to any of them, between two
steps.

Clusters send SIGTERM or SIGUSR1 before they take a machine back; SIGINT is Ctrl-C, SIGHUP a lost
terminal."""

import signal
from types import FrameType
from typing import Any, Self

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
