"""What FSDP2 asks of the allocator: gathering of layers and reduction of their gradients, on
streams of its own.

Read from torch 2.11 to 2.13, distributed/fsdp/_fully_shard. The all-gather's output is made on the
stream that copies into it, the whole parameters on the computing stream, the reduced gradients on
the stream of the reduce-scatter; memory of one stream does not serve another. In forward a layer's
buffer lies there until the next layer is whole, so two of them are there for a moment; in backward
the next layer is gathered ahead. Gradients of a layer wait in the reduction's input until the next
layer's are reduced. With one process nothing of this happens.
"""

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.allocation_tape import COMPUTE, Tape
from workflow.lib.planning.memory.layer_tensors import gathered_bytes
from workflow.lib.planning.memory.offload_terms import hosted_slice
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import hosted_layers, layer_tensors

GATHER, REDUCE = "all_gather_copy_in", "reduce_scatter"
PACKED = ("nf4_weights", "nf4_scales")  # what a layer on the host leaves there


class ShardedLayers:
    """The decoder layers of a model as FSDP units, over the steps of a run."""

    def __init__(self, tape: Tape, shape: ModelShape, setup: Setup) -> None:
        self._tape, self._setup = tape, setup
        self._alone = setup.shards == 1
        self._shape = shape
        self._tensors = [layer_tensors(kind, setup) for kind in shape.kinds]
        self._gathered = {
            (kind, hosted): [
                gathered_bytes([tensor], processes=setup.shards)
                for term, group in self._tensors[kind].by_term.items()
                if not (hosted and term in PACKED)
                for tensor in group
            ]
            for kind in range(len(shape.kinds))
            for hosted in (False, True)
        }
        self._on_host = set(hosted_layers(shape, setup))
        self._whole: dict[int, list[int]] = {}
        self._buffers: dict[int, int] = {}
        self._previous: int | None = None  # buffer of the layer before, in forward
        self._reduction: int | None = None
        self._gradients: dict[int, list[int]] = {}
        self._term = "gathered_layer" if setup.reshard_after_forward else "gathered_layers"

    def before_forward(self, layer: int) -> None:
        """Gather a layer."""
        if self._alone:
            return
        if layer not in self._whole:
            buffer = self._gather(layer, GATHER)
            self.end_forward()
            self._copy_out(layer)
            self._previous = buffer

    def after_forward(self, layer: int) -> None:
        """Free a layer, if it is not kept for backward."""
        if self._setup.reshard_after_forward:
            self.free(layer)

    def end_forward(self) -> None:
        """Let go of the buffer of the layer that was gathered last."""
        if self._previous is not None:
            self._tape.free(self._previous)
            self._previous = None

    def gather_ahead(self, layer: int) -> None:
        """Start to gather the layer that backward wants next."""
        if not self._alone and layer >= 0 and layer not in self._whole:
            self._buffers[layer] = self._gather(layer, GATHER)

    def before_backward(self, layer: int) -> None:
        """Make a layer whole, and gather the next one ahead."""
        if layer in self._buffers:
            self._copy_out(layer)
            self._tape.free(self._buffers.pop(layer))
        self.gather_ahead(layer - 1)

    def after_backward(self, layer: int, gradients: list[int]) -> None:
        """Reduce the adapters' gradients, and free the layer."""
        tape = self._tape
        held = self._gradients.get(layer)
        if self._alone:
            if held is not None:
                tape.free(*gradients)
            else:
                for gradient in gradients:
                    tape.terms[gradient] = "lora_gradients"
                self._gradients[layer] = gradients
            return
        self.free(layer)
        self._end_reduction()
        tensors = self._tensors[self._shape.order[layer]]
        self._reduction = tape.new(tensors.gathered["lora_weights"], "gathered_gradients")
        tape.free(*gradients)
        reduced = tape.new(tensors.sharded["lora_weights"], "lora_gradients", REDUCE)
        if held is not None:
            tape.free(reduced)
        else:
            self._gradients[layer] = [reduced]

    def end_backward(self) -> None:
        """Let go of the last reduction's input."""
        self._end_reduction()

    def drop_gradients(self) -> None:
        """After the optimizer's step."""
        for gradients in self._gradients.values():
            self._tape.free(*gradients)
        self._gradients.clear()

    def check(self, layer: int) -> None:
        """Gather a layer to compare it with the checkpoint: all on the computing stream."""
        if not self._alone and layer not in self._whole:
            buffer = self._gather(layer, COMPUTE)
            self._copy_out(layer)
            self._tape.free(buffer)
        self.free(layer)

    def free(self, layer: int) -> None:
        """Free a gathered layer."""
        self._tape.free(*self._whole.pop(layer, ()))

    def _gather(self, layer: int, stream: str) -> int:
        return self._tape.new(sum(self._sizes(layer)), "gather_buffer", stream)

    def _sizes(self, layer: int) -> list[int]:
        """Bytes of the tensors of a gathered layer."""
        return self._gathered[self._shape.order[layer], layer in self._on_host]

    def _copy_out(self, layer: int) -> None:
        self._whole[layer] = [self._tape.new(size, self._term) for size in self._sizes(layer)]

    def _end_reduction(self) -> None:
        if self._reduction is not None:
            self._tape.free(self._reduction)
            self._reduction = None


class FetchedLayers:
    """What `layer_offload.OffloadedLayers` brings to the device: the layer in use and the one that
    follows, on the computing stream.
    """

    def __init__(self, tape: Tape, shape: ModelShape, setup: Setup) -> None:
        self._tape, self._shards = tape, setup.shards
        self._numbers = set(hosted_layers(shape, setup))
        self._slices = {
            number: hosted_slice(shape.layer(number), setup) for number in self._numbers
        }
        self._buffers: dict[int, int] = {}
        self._mine: dict[int, int] = {}

    def enter(self, layer: int, *, following: int) -> None:
        """Have one layer there, the following one on its way, and no others."""
        for number in set(self._buffers) - {layer, following}:
            self._tape.free(self._buffers.pop(number))
            self._free_slice(number)
        if layer in self._numbers:
            self._fetch(layer)
            self._free_slice(layer)
        if following in self._numbers:
            self._fetch(following)

    def _fetch(self, layer: int) -> None:
        if layer not in self._buffers:
            own = self._slices[layer]
            self._buffers[layer] = self._tape.new(self._shards * own, "fetched_layers")
            if self._shards > 1:
                self._mine[layer] = self._tape.new(own, "fetched_layers")

    def _free_slice(self, layer: int) -> None:
        if layer in self._mine:
            self._tape.free(self._mine.pop(layer))
