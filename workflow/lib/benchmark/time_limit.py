"""The time that a list of cases may take, on a host that is there for a while only."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeLimit:
    """Tells whether cases would end in time if each took as long as those of the slowest start of
    workers before. Those that one start measures share its time evenly.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._case_s = clock, 0.0
        self._end = clock() + limit_s

    def allows(self, num_cases: int) -> bool:
        """Whether so many cases, measured one after the other, would end in time."""
        return self._clock() + num_cases * self._case_s < self._end

    @contextmanager
    def measuring(self, num_cases: int) -> Iterator[None]:
        """Within the block one start of workers measures so many cases."""
        began = self._clock()
        yield
        self._case_s = max(self._case_s, (self._clock() - began) / num_cases)
