"""The allocator's events in training: requests and releases, by phase.

A tensor is a number. A tape is recorded from the engine (`lib/recording`) and replayed
(`replay`)."""

from workflow.lib.planning.work import Work

COMPUTE = "compute"  # the stream of all work but communication
HOST = "host"  # page-locked memory of the host, in place of a stream
LOAD, CHECKS = "load", "check"  # phases before the first step
EMPTY_CACHE = "empty_cache"  # an event: free pages go back to the GPU
STEPS = 2
"""Recorded steps: the second is the first that begins as all others do."""


class Tape:
    """Events in order: a tensor's number, its complement at release, a phase, `EMPTY_CACHE`."""

    def __init__(self) -> None:
        self.events: list[int | str] = []
        self.sizes: list[int] = []
        """Requested bytes, by tensor."""
        self.terms: list[str] = []
        """The term of each tensor."""
        self.streams: list[str] = []
        self.work = Work()

    def _add(self, event: int | str) -> None:
        self.events.append(event)

    def phase(self, name: str) -> None:
        """Begin a phase."""
        self._add(name)

    def empty_cache(self) -> None:
        """Give free pages back to the GPU, as `torch.cuda.empty_cache` does."""
        self._add(EMPTY_CACHE)

    def new(self, num_bytes: float, term: str, stream: str = COMPUTE) -> int:
        """Make a tensor; return its number."""
        number = len(self.sizes)
        self.sizes.append(int(num_bytes))
        self.terms.append(term)
        self.streams.append(stream)
        self._add(number)
        return number

    def free(self, *tensors: int) -> None:
        """Release tensors."""
        for tensor in tensors:
            self._add(~tensor)
