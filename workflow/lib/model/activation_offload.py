"""Activations that backward needs, kept in host memory (ZeRO-Offload's idea, for activations).

Every tensor that autograd saves is copied to page-locked memory on a stream of its own, and fetched
ahead of its use. At most `window_bytes` are on the device while they leave, and while they come.
What several nodes save, in whatever shapes, travels once. Tensors come back in the reverse order,
and never while others leave, so one stream orders all, and host buffers can be used again. A
captured pass (CUDA graph) takes the buffers of an equal pass before it for good, so that each
replay copies to the same places. CPUs do the same without streams, for tests."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from workflow.lib.system.device_types import GPUS

# Smaller tensors (positions, statistics of rows) cost more to move than to keep. 1 / 128 of the
# window is the least that is moved.
WINDOW_TO_SMALLEST = 128


@dataclass(eq=False)
class _Saved:
    """The bytes of a tensor that was handed over."""

    number: int
    host: torch.Tensor  # (num_bytes,) uint8, as are the values on the device
    uses: int = 0  # how often autograd will still ask for it
    values: torch.Tensor | None = None  # on the device, while they are there
    version: int = 0  # of `values`, when they were saved or fetched
    sent: torch.Event | None = None
    fetched: torch.Event | None = None

    @property
    def num_bytes(self) -> int:
        return self.host.numel()

    def check(self) -> None:
        """Raise `RuntimeError`, as autograd does, if the values have changed since."""
        if self.values is not None and self.values._version != self.version:
            raise RuntimeError(
                f"a tensor of {self.num_bytes:,} bytes that backward needs was changed in place"
            )


@dataclass(frozen=True)
class View:
    """One of the tensors that autograd has saved, which may share their bytes."""

    saved: _Saved
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def of(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(self.dtype).as_strided(self.shape, self.strides)


Packed = View | torch.Tensor
"""What stands for a saved tensor; the tensor itself if it stays where it is."""


class ActivationOffload:
    """Takes what a forward pass saves and gives it back to the backward pass that follows."""

    def __init__(self, device: torch.device, *, window_bytes: int) -> None:
        """window_bytes: of what leaves, and later of what comes, on the device at a time."""
        self.device, self.host_bytes = device, 0
        self._window, self._least = window_bytes, window_bytes // WINDOW_TO_SMALLEST
        self._gpu = torch.get_device_module(device)
        self._stream = self._gpu.Stream(device) if device.type in GPUS else None
        self._free: dict[int, list[torch.Tensor]] = {}
        self._saved: list[_Saved] = []
        self._known: dict[tuple[Any, ...], _Saved] = {}
        self._leaving: deque[_Saved] = deque()
        self._next = -1  # the number to fetch next
        self._present = 0  # bytes on the device that backward has not used yet
        # Whether what is saved is taken: at the beginning of a pass, and now.
        self._takes_first = self._takes = True

    def follow_(self, layers: Sequence[nn.Module], numbers: Sequence[int]) -> None:
        """Take only what these layers save, which run one after the other; nothing outside them."""
        self._takes_first = 0 in numbers
        for number, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._layer_ends, number + 1 in numbers))

    def _layer_ends(self, takes: bool, *_: Any) -> None:
        """Set whether what follows is taken: recomputation saves inputs before a layer's hooks."""
        self._takes = takes

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within the block take what autograd saves, but for parameters and what is small."""
        self._begin()
        self._takes = self._takes_first
        with saved_tensors_hooks(self.pack, self.unpack):
            yield
        # Its keys hold addresses of storages, which others may get from now on.
        self._known.clear()
        # What has not left yet is on the device still, so it counts as if it were fetched.
        self._next = len(self._saved) - 1
        self._present = sum(saved.num_bytes for saved in self._leaving)

    def _begin(self) -> None:
        """Take back the buffers of the pass before; new copies come behind on the same stream."""
        for saved in self._saved:
            self._free.setdefault(saved.num_bytes, []).append(saved.host)
        self._saved, self._known = [], {}
        self._leaving.clear()

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Take a tensor; return what stands for it, the tensor itself if it stays."""
        num_bytes, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage()
        expanded = storage.nbytes() < num_bytes  # it would be written out, and so grow
        if not self._takes or num_bytes < self._least or expanded or is_parameter(tensor):
            return tensor
        tensor = dense(tensor.detach())
        offset = tensor.storage_offset() * tensor.element_size()
        # The same bytes in another shape or type are known by where they are. The version tells
        # them from bytes that were written there since.
        key = (tensor.untyped_storage()._cdata, offset, num_bytes, tensor._version)
        saved = self._known.get(key)
        if saved is None:
            saved = self._known[key] = self._send(tensor)
        saved.uses += 1
        self._make_room()
        return View(saved, tensor.dtype, tensor.shape, tensor.stride())

    def _send(self, tensor: torch.Tensor) -> _Saved:
        """Start the copy of a tensor without gaps to the host. `values` holds its memory until
        `_make_room` has waited, which `record_stream` would return late."""
        values = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        saved = _Saved(
            len(self._saved), self._buffer(values.numel()), values=values, version=values._version
        )
        saved.sent = self._copy(saved.host, values)
        self._saved.append(saved)
        self._leaving.append(saved)
        return saved

    def _make_room(self) -> None:
        """Release the oldest leaving tensors beyond the window; the device waits for copies."""
        leaving = sum(saved.num_bytes for saved in self._leaving)
        while leaving > self._window:
            oldest = self._leaving.popleft()
            leaving -= oldest.num_bytes
            self._wait(oldest.sent)
            oldest.check()
            oldest.values = None
            # Another tensor may get its address.
            self._known = {key: saved for key, saved in self._known.items() if saved is not oldest}

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the tensor, for one of its uses."""
        if isinstance(packed, torch.Tensor):
            return packed
        saved = packed.saved
        if saved.values is None:
            self._fetch(saved)
        assert saved.values is not None
        saved.check()
        tensor = packed.of(saved.values)
        self._wait(saved.fetched)  # the device does; the host goes on
        saved.uses -= 1
        if saved.uses == 0:
            saved.values = None
            self._present -= saved.num_bytes
        self._next = min(self._next, saved.number - 1)
        self._fetch_ahead()
        return tensor

    def join(self) -> None:
        """Have the computing stream wait for all copies, when backward has ended: for a capture."""
        # Without copies the stream is in no capture, and a capture may not wait for it.
        if self._stream is not None and self._saved:
            self._gpu.current_stream(self.device).wait_stream(self._stream)

    def _fetch_ahead(self) -> None:
        """Fetch what backward will want next, as far as the window allows."""
        while self._next >= 0:
            saved = self._saved[self._next]
            if saved.values is None and saved.uses > 0:
                if self._present + saved.num_bytes > self._window:
                    return
                self._fetch(saved)
            self._next -= 1

    def _fetch(self, saved: _Saved) -> None:
        """Start the copy to the device, into memory of the computing stream. That stream waits for
        the copy before it uses the values, so also before it frees them."""
        saved.values = torch.empty_like(saved.host, device=self.device, pin_memory=False)
        saved.fetched = self._copy(saved.values, saved.host)
        saved.version = saved.values._version
        self._present += saved.num_bytes

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event | None:
        """Copy bytes behind all that is computed so far, beside what follows; return the event."""
        if self._stream is None:
            target.copy_(source)
            return None
        # To the host: the values must have been computed. To the device: work that is queued may
        # still use the memory that the target was given.
        self._stream.wait_stream(self._gpu.current_stream(self.device))
        with self._gpu.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event: torch.Event = self._stream.record_event()
        return event

    def _wait(self, event: torch.Event | None) -> None:
        if event is not None:
            self._gpu.current_stream(self.device).wait_event(event)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Return host memory (num_bytes,) uint8, page-locked if there is a GPU: copies to and from
        any other memory are not asynchronous. Page-locking takes long, so buffers are kept."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        self.host_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gaps between its elements: a copy if it has some."""
    if tensor.is_contiguous():  # most are, and the other way takes the host longer
        return tensor
    # `empty_like` keeps the strides of tensors that are dense, in whatever order of dimensions.
    gaps = torch.empty_like(tensor, device="meta").stride() != tensor.stride()
    return tensor.contiguous() if gaps else tensor


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a parameter or a view of one, whose memory FSDP frees after forward."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
