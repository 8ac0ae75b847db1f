"""What a training step asks of the allocator, written down: requests, releases, and the phases that
they fall into.

A tensor is a number. It has holders, like an object in Python (a local variable, a module,
autograd's graph), and is released when it has none left. Autograd's part is played by
`SavedTensors`, whose methods are named like the hooks of `torch.autograd.graph`.
"""

from typing import Protocol

COMPUTE = "compute"  # the stream of all but communication


class Tape:
    """Events in their order: a tensor's number where it is made, its complement where it is
    released, a phase's name.
    """

    def __init__(self) -> None:
        self.events: list[int | str] = []
        self.sizes: list[int] = []
        """Bytes asked for, by tensor."""
        self.terms: list[str] = []
        """What a tensor counts as, by tensor."""
        self.streams: list[str] = []
        self._holders: list[int] = []

    def _add(self, event: int | str) -> None:
        self.events.append(event)

    def phase(self, name: str) -> None:
        """What follows belongs to this phase."""
        self._add(name)

    def new(self, num_bytes: float, term: str, stream: str = COMPUTE) -> int:
        """Make a tensor, held once."""
        number = len(self.sizes)
        self.sizes.append(int(num_bytes))
        self.terms.append(term)
        self.streams.append(stream)
        self._holders.append(1)
        self._add(number)
        return number

    def hold(self, tensor: int) -> int:
        """Hold a tensor once more; return it."""
        self._holders[tensor] += 1
        return tensor

    def free(self, *tensors: int) -> None:
        """Give up a hold of each tensor; one without holders is released."""
        for tensor in tensors:
            self._holders[tensor] -= 1
            if self._holders[tensor] == 0:
                self._add(~tensor)

    def moment(self, num_bytes: float, term: str) -> None:
        """A tensor that is released before the next one is made."""
        self.free(self.new(num_bytes, term))


class SavedTensors(Protocol):
    """What autograd does with a tensor that backward needs."""

    def pack(self, tensor: int, term: str = ...) -> int:
        """Save a tensor for backward, counted as `term`; return the handle that `unpack` wants."""

    def unpack(self, handle: int) -> int:
        """Return the tensor, which the caller frees."""


class SavedOnDevice:
    """Saved tensors stay on the device."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def pack(self, tensor: int, term: str = "saved_activations") -> int:
        """Hold the tensor, which is its own handle."""
        self._tape.terms[tensor] = term
        return self._tape.hold(tensor)

    def unpack(self, handle: int) -> int:
        """Return the tensor."""
        return handle


class NotSaved:
    """Nothing is saved: without gradients, or where the tensors are recomputed."""

    def pack(self, tensor: int, term: str = "saved_activations") -> int:
        """Save nothing."""
        return -1

    def unpack(self, handle: int) -> int:
        """Never called."""
        raise AssertionError("nothing was saved")


class OffloadedActivations:
    """Saved tensors that are not small go to host memory, a window of them is on the device at a
    time: `activation_offload.ActivationOffload`.
    """

    def __init__(self, tape: Tape, *, window_bytes: int, smallest_share: int = 128) -> None:
        self._tape, self._window = tape, window_bytes
        self._least = window_bytes // smallest_share
        self._numbers: dict[int, int] = {}  # tensor -> its handle, while it is leaving
        self._tensors: list[int | None] = []
        self._sizes: list[int] = []
        self._terms: list[str] = []
        self._uses: list[int] = []
        self._leaving: list[int] = []
        self._next = -2
        self._present = 0

    def pack(self, tensor: int, term: str = "saved_activations") -> int:
        """Offload the tensor if it is not small; return its index, or a number below 0 if it
        stays.
        """
        size = self._tape.sizes[tensor]
        self._tape.terms[tensor] = "offloaded_activations"
        if size < self._least:
            self._tape.terms[tensor] = term
            return -1 - self._tape.hold(tensor)
        if tensor in self._numbers:
            self._uses[self._numbers[tensor]] += 1
            return self._numbers[tensor]
        index = self._numbers[tensor] = len(self._tensors)
        self._tensors.append(self._tape.hold(tensor))
        self._sizes.append(size)
        self._uses.append(1)
        self._leaving.append(index)
        while sum(self._sizes[p] for p in self._leaving) > self._window:
            self._free(self._leaving.pop(0))
        return index

    def _free(self, index: int) -> None:
        tensor = self._tensors[index]
        if tensor is not None:
            self._tensors[index] = None
            self._numbers.pop(tensor, None)
            self._tape.free(tensor)

    def unpack(self, handle: int) -> int:
        """Return the tensor, fetched if it is away, and fetch what comes next as far as the window
        allows.
        """
        if handle < 0:
            return -1 - handle
        if self._next == -2:
            self._next = len(self._tensors) - 1
            self._present = sum(self._sizes[p] for p in self._leaving)
        if self._tensors[handle] is None:
            self._fetch(handle)
        tensor = self._tensors[handle]
        assert tensor is not None
        self._tape.hold(tensor)
        self._uses[handle] -= 1
        if self._uses[handle] == 0:
            self._free(handle)
            self._present -= self._sizes[handle]
        self._next = min(self._next, handle - 1)
        self._fetch_ahead()
        return tensor

    def _fetch_ahead(self) -> None:
        while self._next >= 0:
            if self._tensors[self._next] is None and self._uses[self._next] > 0:
                if self._present + self._sizes[self._next] > self._window:
                    return
                self._fetch(self._next)
            self._next -= 1

    def _fetch(self, index: int) -> None:
        self._tensors[index] = self._tape.new(self._sizes[index], "offloaded_activations")
        self._present += self._sizes[index]
