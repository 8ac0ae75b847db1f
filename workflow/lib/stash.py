"""Activations that backward needs, kept in host memory instead of the device's (ZeRO-Offload's idea, for activations).

Autograd hands every tensor that it saves to `Stash`, which copies it to page-locked memory on a stream of its own, and
fetches it back ahead of its use. Of the tensors that are on their way, and of those fetched but not yet used, at most
`window_bytes` are on the device at a time each. With recomputation what is saved of a layer is its input alone.

A tensor leaves in the order in which it was saved and comes back in the reverse order, as backward wants them; the
two never happen at once, so one stream orders them, and a host buffer can be used again as soon as it was read.
On the CPU the same is done without streams, which only moves bytes: for tests.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST_SHARE = 128  # of the window: smaller tensors (positions, statistics of rows) cost more to move than to keep


@dataclass(eq=False)
class _Saved:
    """A tensor that was handed over."""

    number: int
    num_bytes: int
    buffer: torch.Tensor
    host: torch.Tensor
    """The tensor's values in `buffer`, in its shape and strides."""
    uses: int = 1
    """How often autograd will still ask for it."""
    tensor: torch.Tensor | None = None
    """On the device, while it is there."""
    sent: torch.cuda.Event | None = None
    fetched: torch.cuda.Event | None = None


class Stash:
    """Takes what a forward pass saves and gives it back to the backward pass that follows."""

    def __init__(self, device: torch.device, *, window_bytes: int) -> None:
        """window_bytes: of what leaves, and later of what comes, on the device at a time."""
        self.device, self.host_bytes = device, 0
        self._window, self._least = window_bytes, window_bytes // SMALLEST_SHARE
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[int, list[torch.Tensor]] = {}
        self._saved: list[_Saved] = []
        self._known: dict[tuple[Any, ...], _Saved] = {}
        self._leaving: deque[_Saved] = deque()
        self._next = -1  # the number to fetch next
        self._present = 0  # bytes on the device that backward has not used yet
        self._begins = self._takes = True  # whether what is saved now is taken

    def follow_(self, layers: Sequence[nn.Module], numbers: Sequence[int]) -> None:
        """Take only what the layers of these numbers save, of layers that run one after the other; nothing before and after them."""
        self._begins = 0 in numbers
        for number, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._layer_ends, number + 1 in numbers))

    def _layer_ends(self, takes: bool, *_: Any) -> None:
        """Set whether what follows is taken: with recomputation a layer's input is saved before its own hooks run."""
        self._takes = takes

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within the block take what autograd saves, but for parameters and what is small."""
        self._begin()
        self._takes = self._begins
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._known.clear()
        self._next = len(self._saved) - 1
        self._present = sum(saved.num_bytes for saved in self._leaving)

    def _begin(self) -> None:
        """Take back the buffers of the pass before."""
        for saved in self._saved:
            self._free.setdefault(saved.num_bytes, []).append(saved.buffer)
        self._saved, self._known = [], {}
        self._leaving.clear()

    def _pack(self, tensor: torch.Tensor) -> "_Saved | torch.Tensor":
        num_bytes, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage()
        expanded = storage.nbytes() < num_bytes
        if not self._takes or num_bytes < self._least or expanded or _is_parameter(tensor):
            return tensor
        key = (
            storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version,
        )  # fmt: skip
        if (known := self._known.get(key)) is not None:
            known.uses += 1
            return known
        saved = self._known[key] = self._send(tensor.detach(), num_bytes)
        self._make_room()
        return saved

    def _send(self, tensor: torch.Tensor, num_bytes: int) -> _Saved:
        """Start the copy to the host; the tensor stays until the copy is done."""
        buffer = self._buffer(num_bytes)
        strides = torch.empty_like(tensor, device="meta").stride()  # without gaps
        host = buffer.view(tensor.dtype).as_strided(tensor.shape, strides)
        saved = _Saved(len(self._saved), num_bytes, buffer, host, tensor=tensor)
        saved.sent = self._copy(host, tensor)
        self._saved.append(saved)
        self._leaving.append(saved)
        return saved

    def _make_room(self) -> None:
        """Let go of the oldest tensors that leave while they are more than the window; the device waits for their copies."""
        leaving = sum(saved.num_bytes for saved in self._leaving)
        while leaving > self._window:
            oldest = self._leaving.popleft()
            leaving -= oldest.num_bytes
            self._wait(oldest.sent)
            oldest.tensor = None
            self._known = {key: saved for key, saved in self._known.items() if saved is not oldest}

    def _unpack(self, packed: "_Saved | torch.Tensor") -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.tensor is None:
            self._fetch(packed)
        tensor = packed.tensor
        assert tensor is not None
        self._wait(packed.fetched)
        packed.uses -= 1
        if packed.uses == 0:
            packed.tensor = None
            self._present -= packed.num_bytes
        self._next = min(self._next, packed.number - 1)
        self._fetch_ahead()
        return tensor

    def _fetch_ahead(self) -> None:
        """Fetch what backward will want next, as far as the window allows."""
        while self._next >= 0:
            saved = self._saved[self._next]
            if saved.tensor is None and saved.uses > 0:
                if self._present + saved.num_bytes > self._window:
                    return
                self._fetch(saved)
            self._next -= 1

    def _fetch(self, saved: _Saved) -> None:
        """Start the copy to the device, into memory of the computing stream."""
        saved.tensor = torch.empty_like(saved.host, device=self.device, pin_memory=False)
        saved.fetched = self._copy(saved.tensor, saved.host)
        self._present += saved.num_bytes

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        """Copy behind all that is computed so far, beside what follows; return the event of its end."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Return host memory (num_bytes,) uint8, page-locked if there is a GPU."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        self.host_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a parameter or a view of one: FSDP frees its memory after forward and fills it again."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
