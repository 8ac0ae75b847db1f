"""Offload of activations to host memory until backward (ZeRO-Offload's idea, for activations).

Each tensor that autograd saves is copied to page-locked memory on a separate stream, and fetched
ahead of its use. At most `window_bytes` of leaving tensors are on the device, and later of fetched
ones. Tensors that share bytes are copied once. They are fetched in the reverse order and after all
copies to the host, so one stream orders all copies and host buffers are reused. A captured pass
(CUDA graph) takes over the buffers of an equal pass before it: each replay copies to the same
addresses. CPU tensors are copied without streams, for tests."""

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

# Smaller tensors (positions, row statistics) stay on the device: moving them costs more. The
# smallest offloaded tensor has 1 / 128 of the window.
WINDOW_TO_SMALLEST = 128


@dataclass(eq=False)
class _Saved:
    """The bytes of one offloaded tensor."""

    number: int
    host: torch.Tensor  # (num_bytes,) uint8, as `values`
    uses: int = 0  # how many times autograd will still unpack it
    values: torch.Tensor | None = None  # on the device; None while the host alone has the bytes
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
"""An offloaded tensor; the tensor itself if it stays on the device."""


class ActivationOffload:
    """Packs the tensors that a forward pass saves and unpacks them in the next backward pass."""

    def __init__(self, device: torch.device, *, window_bytes: int) -> None:
        """window_bytes: bound of the leaving, and later of the fetched, bytes on the device."""
        self.device, self.host_bytes = device, 0
        self._window, self._least = window_bytes, window_bytes // WINDOW_TO_SMALLEST
        self._gpu = torch.get_device_module(device)
        self._stream = self._gpu.Stream(device) if device.type in GPUS else None
        self._free: dict[int, list[torch.Tensor]] = {}
        self._saved: list[_Saved] = []
        self._by_view: dict[tuple[Any, ...], _Saved] = {}
        self._leaving: deque[_Saved] = deque()
        self._next = -1  # the next index to fetch
        self._present = 0  # bytes on the device that backward has not used yet
        # Whether saved tensors are offloaded: at the start of a pass, and now.
        self._takes_first = self._takes = True

    def follow_(self, layers: Sequence[nn.Module], numbers: Sequence[int]) -> None:
        """Offload only tensors saved by these layers, which run one after the other."""
        self._takes_first = 0 in numbers
        for number, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._layer_ends, number + 1 in numbers))

    def _layer_ends(self, takes: bool, *_: Any) -> None:
        """Switch offload of the next tensors: recomputation saves inputs before a layer's hooks."""
        self._takes = takes

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within the block offload saved tensors, except parameters and small tensors."""
        self._begin()
        self._takes = self._takes_first
        with saved_tensors_hooks(self.pack, self.unpack):
            yield
        # Its keys hold addresses of storages, which later tensors may reuse.
        self._by_view.clear()
        # Tensors that have not left yet are still on the device, so they count as fetched.
        self._next = len(self._saved) - 1
        self._present = sum(saved.num_bytes for saved in self._leaving)

    def _begin(self) -> None:
        """Take back the buffers of the pass before; new copies follow on the same stream."""
        for saved in self._saved:
            self._free.setdefault(saved.num_bytes, []).append(saved.host)
        self._saved, self._by_view = [], {}
        self._leaving.clear()

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return the `View` of an offloaded tensor, or the tensor itself if it stays."""
        num_bytes, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage()
        expanded = storage.nbytes() < num_bytes  # a copy would be larger
        if not self._takes or num_bytes < self._least or expanded or is_parameter(tensor):
            return tensor
        tensor = dense(tensor.detach())
        offset = tensor.storage_offset() * tensor.element_size()
        # Tensors of the same bytes in another shape or dtype have the same key. The version tells
        # them from bytes written there later.
        key = (tensor.untyped_storage()._cdata, offset, num_bytes, tensor._version)
        saved = self._by_view.get(key)
        if saved is None:
            saved = self._by_view[key] = self._send(tensor)
        saved.uses += 1
        self._make_room()
        return View(saved, tensor.dtype, tensor.shape, tensor.stride())

    def _send(self, tensor: torch.Tensor) -> _Saved:
        """Start the copy of a tensor without gaps to the host. `values` holds its device memory
        until `_make_room` has waited; `record_stream` would return it late."""
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
            self._by_view = {
                key: saved for key, saved in self._by_view.items() if saved is not oldest
            }

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
        self._wait(saved.fetched)  # the device waits, not the host
        saved.uses -= 1
        if saved.uses == 0:
            saved.values = None
            self._present -= saved.num_bytes
        self._next = min(self._next, saved.number - 1)
        self._fetch_ahead()
        return tensor

    def join(self) -> None:
        """Make the computing stream wait for all copies after backward, for a capture."""
        # Without copies the stream is in no capture, and a capture may not wait for it.
        if self._stream is not None and self._saved:
            self._gpu.current_stream(self.device).wait_stream(self._stream)

    def _fetch_ahead(self) -> None:
        """Fetch the next tensors of backward, as far as the window allows."""
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
        """Copy bytes after the queued computation, beside later computation; return the event."""
        if self._stream is None:
            target.copy_(source)
            return None
        # To the host: the values must have been computed. To the device: queued work may still use
        # the memory of the target.
        self._stream.wait_stream(self._gpu.current_stream(self.device))
        with self._gpu.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event: torch.Event = self._stream.record_event()
        return event

    def _wait(self, event: torch.Event | None) -> None:
        if event is not None:
            self._gpu.current_stream(self.device).wait_event(event)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Return host memory (num_bytes,) uint8, page-locked if there is a GPU: only such copies
        are asynchronous. Page-locking is slow, so buffers are reused."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        self.host_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gaps between its elements: a copy if it has some."""
    if tensor.is_contiguous():  # most are, and the test below takes the host longer
        return tensor
    # `empty_like` keeps the strides of tensors that are dense, in any order of dimensions.
    gaps = torch.empty_like(tensor, device="meta").stride() != tensor.stride()
    return tensor.contiguous() if gaps else tensor


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a parameter or a view of one, whose memory FSDP frees after forward."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
