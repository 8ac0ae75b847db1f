"""Packed weights of decoder layers: each process keeps a slice, and gathers the rest for the
layer's own forward and backward.

A layer's packed tensors are concatenated, and each process has a slice of these bytes on the device
or in page-locked host memory. While another layer computes, a stream gathers all slices into one
buffer, whose views are the parameters: FSDP2, which shards the rest, would copy twice. A single
process only copies layers from host memory. CPUs do the same without streams."""

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.distributed.vocabulary_parallel import ALL_GATHER
from workflow.lib.distributed.weight_checks import different_parts, names_of_all
from workflow.lib.distributed.world import World
from workflow.lib.model.layers.frozen_linear import FrozenLinear, frozen_linears
from workflow.lib.model.nf4_model import checkpoint_name
from workflow.lib.system.device_types import GPUS

ALIGNMENT = 512  # bytes; of every part in its layer's buffer, and of the slices


@dataclass(frozen=True)
class _Part:
    """One packed parameter, and its offset in the buffer of its layer."""

    linear: FrozenLinear
    path: str
    name: str
    start: int

    @property
    def num_bytes(self) -> int:
        return self.linear.spec.sizes[self.name]

    def point_at_(self, buffer: torch.Tensor) -> None:
        """Make the parameter a view of its bytes, padded to whole float32 elements."""
        stop = self.start + 4 * math.ceil(self.num_bytes / 4)
        self.linear.get_parameter(self.name).data = buffer[self.start : stop].view(torch.float32)


class _PackedLayer:
    """The packed weights of one layer: this process's slice, and all of them while in use. on_host:
    keep the slice in host memory; stream: of the gather, None on the CPU."""

    def __init__(
        self,
        linears: list[tuple[str, FrozenLinear]],
        *,
        world: World,
        stream: torch.Stream | None,
        on_host: bool,
    ) -> None:
        self._parts = list(_laid_out(linears))
        last = self._parts[-1]
        self._axis = world.axis("shard")
        share = math.ceil((last.start + last.num_bytes) / self._axis.size())
        self.slice_bytes = _aligned(share)
        self.on_host = on_host
        self._slice_start = self._axis.get_local_rank() * self.slice_bytes
        self._world, self._stream = world, stream
        self._gpu = torch.get_device_module(world.device)
        self.slice = torch.empty(0, dtype=torch.uint8)
        self._buffer: torch.Tensor | None = None
        self._gathered: torch.Event | None = None

    @property
    def whole_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    def empty_(self) -> None:
        """Remove the packed parameters from a meta-device model: nothing else loads them then."""
        for part in self._parts:
            nothing = torch.empty(0, device="meta")
            setattr(part.linear, part.name, nn.Parameter(nothing, requires_grad=False))

    def parameters(self) -> set[nn.Parameter]:
        return {part.linear.get_parameter(part.name) for part in self._parts}

    def allocate_(self) -> None:
        pinned = self.on_host and self._stream is not None
        device = torch.device("cpu") if self.on_host else self._world.device
        self.slice = torch.zeros(
            self.slice_bytes, dtype=torch.uint8, device=device, pin_memory=pinned
        )

    def load_(self, reader: CheckpointReader) -> int:
        first = self._slice_start
        self.allocate_()
        bytes_read = 0
        for part in self._parts:
            start = max(first - part.start, 0)
            stop = min(first + self.slice_bytes - part.start, part.num_bytes)
            if start < stop:
                data = part.linear.spec.read_bytes(
                    part.name, part.path, reader, start=start, stop=stop
                )
                self.slice[part.start + start - first :][: data.numel()].copy_(data)
                bytes_read += data.numel()
        return bytes_read

    def fetch(self) -> None:
        """Start to gather the weights, unless they are gathered. Collective."""
        if self._buffer is not None:
            return
        device, shards = self._world.device, self._axis.size()
        if shards == 1 and not self.on_host:
            self._buffer = self.slice
            return
        # The allocator returns freed memory to the stream of its allocation at once. So the buffer
        # is allocated on the computing stream, which waits for the copy before it uses the bytes or
        # frees them: `record_stream` is not needed.
        self._buffer = torch.empty(shards * self.slice_bytes, dtype=torch.uint8, device=device)
        with self._beside():
            self._gather(self._buffer)

    def _gather(self, buffer: torch.Tensor) -> None:
        """Fill a buffer with all processes' slices; slices on the host are copied first."""
        own_slice = self.slice
        if self.on_host:
            own_slice = buffer.narrow(0, self._slice_start, self.slice_bytes)
            own_slice.copy_(self.slice, non_blocking=True)
        if self._axis.size() > 1:
            ALL_GATHER(buffer, own_slice, group=self._axis.get_group())

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within the block queue work after all computation so far, beside later computation."""
        if self._stream is None:
            yield
            return
        # the buffer may be memory that queued work still reads
        self._stream.wait_stream(self._gpu.current_stream(self._world.device))
        with self._gpu.stream(self._stream):
            yield
        self._gathered = self._stream.record_event()

    def unshard(self) -> None:
        """Give the parameters their values; later work waits for them. Collective."""
        self.fetch()
        self._wait()
        assert self._buffer is not None
        for part in self._parts:
            part.point_at_(self._buffer)

    def reshard(self) -> None:
        if self._buffer is None:
            return
        self._wait()  # a running copy must not write to memory that others have got
        nothing = torch.empty(0, device=self._buffer.device)
        for part in self._parts:
            part.linear.get_parameter(part.name).data = nothing
        self._buffer = None

    def _wait(self) -> None:
        if self._gathered is not None:
            self._gpu.current_stream(self._world.device).wait_event(self._gathered)
        self._gathered = None

    def abandon(self) -> None:
        """Free the weights after a failed capture, in which nothing has run: no event to await."""
        self._gathered = None
        self.reshard()

    def differences(self, reader: CheckpointReader) -> list[str]:
        """Return the packed tensors on the device that differ from the checkpoint, bit by bit."""
        linears = {part.path: part.linear for part in self._parts}
        return [name for path, x in linears.items() for name in different_parts(x, path, reader)]


def _laid_out(linears: list[tuple[str, FrozenLinear]]) -> Iterator[_Part]:
    start = 0
    for path, linear in linears:
        for name, num_bytes in linear.spec.sizes.items():
            yield _Part(linear, path, name, start)
            start += _aligned(num_bytes)


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


class PackedLayers:
    """Decoder layers of a model, by number, whose packed weights are gathered for each use. Made of
    a meta model before sharding (FSDP2 ignores `parameters`), filled by `load_`. Hooks gather the
    layer in use and the next one."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        on_device: Iterable[int],
        on_host: Iterable[int],
        keep_to_backward: bool,
        world: World,
    ) -> None:
        """on_device, on_host: layers by the place of a process's slice; keep_to_backward: layers
        with slices on the device stay gathered after forward."""
        layers = decoder_layers(model)
        gpu = torch.get_device_module(world.device)
        stream = gpu.Stream(world.device) if world.device.type in GPUS else None
        paths = {id(linear): checkpoint_name(path) for path, linear in frozen_linears(model)}
        from_host_by_layer = dict.fromkeys(on_device, False) | dict.fromkeys(on_host, True)
        self._layers: dict[int, _PackedLayer] = {}
        for number, from_host in sorted(from_host_by_layer.items()):
            linears = [(paths[id(linear)], linear) for _, linear in frozen_linears(layers[number])]
            if not linears:
                continue
            packed = _PackedLayer(linears, world=world, stream=stream, on_host=from_host)
            packed.empty_()
            self._layers[number] = packed
        self._world, self._keep_to_backward = world, keep_to_backward
        self._backward: int | None = None  # the layer in backward
        model.get_decoder().register_forward_pre_hook(self._begin)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before_forward, number))
            layer.register_forward_hook(partial(self._after_forward, number))

    @property
    def device_bytes(self) -> int:
        """Bytes of the slices that this process keeps on its device."""
        return sum(x.slice_bytes for x in self._layers.values() if not x.on_host)

    def fair_share(self) -> float:
        """Return the bytes that this process should keep on its device, apart from rounding."""
        whole = sum(layer.whole_bytes for layer in self._layers.values() if not layer.on_host)
        return whole / self._world.shard_size

    @property
    def host_bytes(self) -> int:
        """Bytes of the slices in host memory."""
        return sum(x.slice_bytes for x in self._layers.values() if x.on_host)

    @property
    def layers_on_host(self) -> int:
        return sum(layer.on_host for layer in self._layers.values())

    def parameters(self) -> set[nn.Parameter]:
        """Return the packed parameters of these layers, which are empty out of use."""
        return set().union(*(layer.parameters() for layer in self._layers.values()))

    def allocate_(self) -> None:
        """Make this process's slices, of zeros: enough for a recording of memory."""
        for layer in self._layers.values():
            layer.allocate_()

    def load_(self, reader: CheckpointReader) -> int:
        """Fill this process's slices from the checkpoint; return bytes read."""
        bytes_read = 0
        for layer in self._layers.values():
            bytes_read += layer.load_(reader)
            self._world.moved()
        return bytes_read

    @property
    def slices(self) -> dict[int, torch.Tensor]:
        """This process's slice of each layer, by its number: (bytes,) uint8."""
        return {number: layer.slice for number, layer in self._layers.items()}

    @contextmanager
    def gathered(self, number: int) -> Iterator[None]:
        """Give layer `number` its values within the block. Collective, between micro-batches."""
        self._layers[number].unshard()
        yield
        self._layers[number].reshard()

    def mismatched(self, reader: CheckpointReader) -> list[str]:
        """Gather every layer and compare it with the checkpoint; return the tensors that differ.
        Each layer is compared on one process. Collective."""
        wrong = []
        for turn, (number, layer) in enumerate(self._layers.items()):
            with self.gathered(number):
                if turn % self._world.size == self._world.rank:
                    wrong += layer.differences(reader)
            self._world.moved()
        return names_of_all(wrong, self._world)

    def free(self) -> None:
        """Free all but this process's slices."""
        for layer in self._layers.values():
            layer.reshard()

    def abandon(self) -> None:
        """Free them after a failed capture."""
        for layer in self._layers.values():
            layer.abandon()

    def _begin(self, *_: Any) -> None:
        """At the begin of a forward, gather its first layer during the embedding's lookup."""
        self._backward = None
        self.free()
        if 0 in self._layers:
            self._layers[0].fetch()

    def _before_forward(self, number: int, *_: Any) -> None:
        if self._backward == number:
            return  # it is recomputed, with gathered weights
        staying = self._keep_to_backward and torch.is_grad_enabled()
        for other, layer in self._layers.items():
            if other not in (number, number + 1) and (layer.on_host or not staying):
                layer.reshard()
        self._enter(number, following=number + 1)

    def _after_forward(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        if self._backward == number or not torch.is_grad_enabled():
            return
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, _: torch.Tensor) -> None:
        if self._backward == number:
            return
        self._backward = number
        for other, layer in self._layers.items():
            if other > number:
                layer.reshard()
        self._enter(number, following=number - 1)

    def _enter(self, number: int, *, following: int) -> None:
        """Wait for the gathered weights of layer `number`, and start to gather the next one's."""
        if number in self._layers:
            self._layers[number].unshard()
        if following in self._layers:
            self._layers[following].fetch()


def gather_layers_(
    model: PreTrainedModel,
    numbers_on_host: Collection[int],
    *,
    keep_to_backward: bool,
    world: World,
) -> PackedLayers | None:
    """Remove the packed weights of decoder layers from a meta-device model: of all if several
    processes train it, else of those with weights in host memory. None without any."""
    on_device = range(len(decoder_layers(model))) if world.size > 1 else ()
    if not on_device and not numbers_on_host:
        return None
    return PackedLayers(
        model,
        on_device=on_device,
        on_host=numbers_on_host,
        keep_to_backward=keep_to_backward,
        world=world,
    )
