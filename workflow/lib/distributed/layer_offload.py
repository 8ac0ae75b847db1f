"""Packed weights of some decoder layers kept in host memory, and brought to the device for the
layer's own forward and backward.

Each process keeps its slice of a layer's packed bytes in page-locked memory. While the layer before
(in backward the one behind) computes, a stream of its own copies the slice and gathers all slices
into one buffer; the layer's parameters are views of it, so nothing is copied once more. Adapters,
their gradients, norms and biases stay where they are: FSDP2's own offloading moves whole groups
with their gradients, and copies on the computing stream where it is asked to by hand. With one
process there is nothing to gather. On the CPU the same is done without streams: for tests.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.distributed.vocabulary_parallel import ALL_GATHER
from workflow.lib.distributed.weight_checks import different_parts, names_of_all
from workflow.lib.distributed.world import World
from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.layers.nf4_linear import NF4Linear, nf4_linears
from workflow.lib.model.nf4_model import checkpoint_name, read_bytes
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.system.device_types import GPUS

ALIGNMENT = 512  # bytes; of every part in its layer's buffer, and of the slices


@dataclass(frozen=True)
class _Part:
    """One packed parameter, and where its bytes begin in the buffer of its layer."""

    linear: NF4Linear
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

    def clear_(self) -> None:
        """Take the values from the parameter."""
        parameter = self.linear.get_parameter(self.name)
        parameter.data = torch.empty(0, device=parameter.device)


class _OffloadedLayer:
    """The packed weights of one layer: this process's slice of them on the host, all of them on the
    device while in use.
    """

    def __init__(
        self,
        linears: list[tuple[str, NF4Linear]],
        *,
        world: World,
        stream: torch.Stream | None,
    ) -> None:
        self._parts = list(_laid_out(linears))
        last = self._parts[-1]
        share = math.ceil((last.start + last.num_bytes) / world.shard_size)
        self.slice_bytes = _aligned(share)
        self._world, self._stream = world, stream
        self._gpu = torch.get_device_module(world.device)
        self._host = torch.empty(0, dtype=torch.uint8)
        self._mine: torch.Tensor | None = None
        self._buffer: torch.Tensor | None = None
        self._fetched: torch.Event | None = None

    def empty_(self) -> None:
        """Take the packed parameters from a meta-device model: nothing shards, allocates or loads
        them then.
        """
        for part in self._parts:
            nothing = torch.empty(0, device="meta")
            setattr(part.linear, part.name, nn.Parameter(nothing, requires_grad=False))

    def parameters(self) -> set[nn.Parameter]:
        """Return the packed parameters."""
        return {part.linear.get_parameter(part.name) for part in self._parts}

    def allocate_(self) -> None:
        """Make this process's slice, of zeros."""
        pinned = self._stream is not None
        self._host = torch.zeros(self.slice_bytes, dtype=torch.uint8, pin_memory=pinned)

    def load_(self, reader: CheckpointReader) -> int:
        """Fill this process's slice; return the bytes read."""
        mesh = self._world.mesh
        first = mesh.get_local_rank(mesh.ndim - 1) * self.slice_bytes
        self.allocate_()
        bytes_read = 0
        for part in self._parts:
            start = max(first - part.start, 0)
            stop = min(first + self.slice_bytes - part.start, part.num_bytes)
            if start < stop:
                data = read_bytes(part.linear, part.name, part.path, reader, start=start, stop=stop)
                self._host[part.start + start - first :][: data.numel()].copy_(data)
                bytes_read += data.numel()
        return bytes_read

    def fetch(self) -> None:
        """Start to bring the weights to the device, unless they are there. Collective."""
        if self._buffer is not None:
            return
        # The allocator gives memory back to the stream on which it was allocated, as soon as no
        # tensor has it. So the buffer is allocated on the computing stream, which waits for the
        # copy before it uses the bytes or frees them: `record_stream` is not needed.
        device, shards = self._world.device, self._world.shard_size
        self._buffer = torch.empty(shards * self.slice_bytes, dtype=torch.uint8, device=device)
        self._mine = (
            self._buffer if shards == 1 else torch.empty_like(self._buffer[: self.slice_bytes])
        )
        with self._beside():
            self._mine.copy_(self._host, non_blocking=True)
            if shards > 1:
                mesh = self._world.mesh
                ALL_GATHER(self._buffer, self._mine, group=mesh.get_group(mesh.ndim - 1))

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Within the block work behind all that is computed so far, beside what follows."""
        if self._stream is None:
            yield
            return
        # the buffer may be memory that queued work still reads
        self._stream.wait_stream(self._gpu.current_stream(self._world.device))
        with self._gpu.stream(self._stream):
            yield
        self._fetched = self._stream.record_event()

    def unshard(self) -> None:
        """Give the parameters their values; what is computed from now on waits for them.
        Collective.
        """
        self.fetch()
        self._wait()
        assert self._buffer is not None
        for part in self._parts:
            part.point_at_(self._buffer)

    def reshard(self) -> None:
        """Free the weights on the device, if they are there."""
        if self._buffer is None:
            return
        self._wait()  # a copy that is under way must not write to memory that others have got
        for part in self._parts:
            part.clear_()
        self._buffer = None

    def _wait(self) -> None:
        if self._fetched is not None:
            self._gpu.current_stream(self._world.device).wait_event(self._fetched)
        self._fetched = self._mine = None

    def differences(self, reader: CheckpointReader) -> list[str]:
        """Return the packed tensors that differ from the checkpoint, bit by bit, while they are on
        the device.
        """
        linears = {part.path: part.linear for part in self._parts}
        return [name for path, x in linears.items() for name in different_parts(x, path, reader)]


def _laid_out(linears: list[tuple[str, NF4Linear]]) -> Iterator[_Part]:
    """Yield the parts of a layer's linears one behind the other."""
    start = 0
    for path, linear in linears:
        for name, num_bytes in linear.spec.sizes.items():
            yield _Part(linear, path, name, start)
            start += _aligned(num_bytes)


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


class OffloadedLayers:
    """Decoder layers of a model, by number, whose packed weights wait in host memory.

    Made of a meta-device model before it is sharded (`parameters` are then no business of FSDP's),
    filled by `load_`. Follows the model's forward and backward by hooks: at most the layer in use
    and the next one are on the device.
    """

    def __init__(self, model: PreTrainedModel, numbers: Sequence[int], *, world: World) -> None:
        layers = decoder_layers(model)
        gpu = torch.get_device_module(world.device)
        stream = gpu.Stream(world.device) if world.device.type in GPUS else None
        paths = {id(linear): checkpoint_name(path) for path, linear in nf4_linears(model)}
        self._layers: dict[int, _OffloadedLayer] = {}
        for number in numbers:
            linears = [(paths[id(linear)], linear) for _, linear in nf4_linears(layers[number])]
            self._layers[number] = _OffloadedLayer(linears, world=world, stream=stream)
            self._layers[number].empty_()
        self._world = world
        self._backward: int | None = None  # the layer whose backward runs
        model.get_decoder().register_forward_pre_hook(self._begin)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before_forward, number))
            layer.register_forward_hook(partial(self._after_forward, number))

    @property
    def host_bytes(self) -> int:
        """Bytes that this process keeps in host memory."""
        return sum(layer.slice_bytes for layer in self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)

    def parameters(self) -> set[nn.Parameter]:
        """Return the packed parameters of these layers, which hold nothing while they are not in
        use.
        """
        return set().union(*(layer.parameters() for layer in self._layers.values()))

    def allocate_(self) -> None:
        """Make this process's slices, of zeros: all that a recording of memory needs."""
        for layer in self._layers.values():
            layer.allocate_()

    def load_(self, folder: Path, *, moved: Callable[[], None] = lambda: None) -> int:
        """Fill this process's slices from the NF4 checkpoint, calling `moved` after each layer;
        return the bytes read.
        """
        bytes_read = 0
        with CheckpointReader(folder) as reader:
            for layer in self._layers.values():
                bytes_read += layer.load_(reader)
                moved()
        return bytes_read

    def mismatched(
        self, reader: CheckpointReader, *, moved: Callable[[], None] = lambda: None
    ) -> list[str]:
        """Bring every layer to the device and compare it with the checkpoint; return the tensors
        that differ.

        Each layer is compared on one process; after each, all call `moved`. Collective.
        """
        self._keep()
        wrong = []
        for index, layer in enumerate(self._layers.values()):
            layer.unshard()
            if index % self._world.size == self._world.rank:
                wrong += layer.differences(reader)
            layer.reshard()
            moved()
        return names_of_all(wrong, self._world)

    def _begin(self, *_: Any) -> None:
        """A forward pass begins, so no backward runs."""
        self._backward = None

    def _before_forward(self, number: int, *_: Any) -> None:
        if self._backward != number:  # else it is recomputed, with what is there
            self._enter(number, following=number + 1)

    def _after_forward(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        if self._backward == number or not torch.is_grad_enabled():
            return
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, number))

    def _before_backward(self, number: int, _: torch.Tensor) -> None:
        if self._backward != number:
            self._backward = number
            self._enter(number, following=number - 1)

    def _enter(self, number: int, *, following: int) -> None:
        """Have the weights of layer `number` there, those of the following one on their way, and no
        others.
        """
        self._keep(number, following)
        if number in self._layers:
            self._layers[number].unshard()
        if following in self._layers:
            self._layers[following].fetch()

    def _keep(self, *numbers: int) -> None:
        for number, layer in self._layers.items():
            if number not in numbers:
                layer.reshard()


def offload_layers_(
    model: PreTrainedModel, numbers: Sequence[int], *, world: World
) -> OffloadedLayers | None:
    """Take the packed weights of these layers out of a meta-device model; None for none."""
    return OffloadedLayers(model, numbers, world=world) if numbers else None
