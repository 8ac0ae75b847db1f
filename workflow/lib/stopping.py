"""Stopping a run on request: a signal to any process becomes one decision of all, taken between two steps."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context manager: within it SIGINT and SIGTERM only ask; `agreed()` tells, on all processes alike, whether one asked."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._asked = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def agreed(self) -> bool:
        """Return whether any process was asked to stop. Collective."""
        flag = torch.tensor(int(self._asked))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)
