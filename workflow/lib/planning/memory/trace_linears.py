"""What the linears of a decoder layer ask of the allocator, operation by operation, forward and
backward.

Written from what runs: `lora_linear`, `nf4_lora_matmul` and `dora`, and the kernels of torch and
the project that they call; compared with a record of all tensors that they made. What an operation
borrows and makes, `trace_norms` says.
"""

from collections.abc import Callable, Sequence

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear
from workflow.lib.planning.memory.allocation_tape import SavedTensors, Tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.trace_adapters import AdapterTrace
from workflow.lib.planning.memory.trace_norms import WORK, Backward


class LinearTrace(AdapterTrace):
    """The linears of a kind of layer, as one process runs them."""

    def __init__(self, tape: Tape, layer: DecoderLayer, setup: Setup, *, tokens: int) -> None:
        """tokens: of the micro-batch."""
        super().__init__(tape, layer, setup, tokens=tokens)
        self._begun_products: list[int] = []

    def _product(self, linear: Linear) -> int:
        """W x."""
        weight = self.dequantized(linear)
        y = self._tape.new(self._c * self._tokens * linear.out_features, WORK)
        self._tape.free(weight)
        return y

    def _product_backward(self, linear: Linear) -> int:
        """The gradient of x through W x."""
        weight = self.dequantized(linear)
        grad_x = self._tape.new(self._c * self._tokens * linear.in_features, WORK)
        self._tape.free(weight)
        return grad_x

    def linear(
        self,
        linear: Linear,
        x: int,
        saved: SavedTensors,
        *,
        value: bool = True,
        wants_x: bool = True,
    ) -> tuple[int, Backward]:
        """A linear with its adapter; without `value` only what backward needs is made, and -1
        returned for it.

        wants_x: whether the input has a gradient; without, backward returns -1.
        """
        if linear.name not in self._setup.targets:
            y = self._product(linear) if value else -1
            return y, lambda grad: self._frozen_backward(linear, grad, wants_x=wants_x)
        if self._setup.dropout and self._dora:
            return self._dropped_dora(linear, saved, wants_x=wants_x)
        return self._fused_linear(linear, x, saved, value=value, wants_x=wants_x)

    def _frozen_backward(self, linear: Linear, grad: int, *, wants_x: bool) -> int:
        grad_x = self._begun_products.pop() if self._begun_products else -1
        if wants_x and grad_x < 0:
            grad_x = self._product_backward(linear)
        self._tape.free(grad)
        return grad_x

    def _fused_linear(
        self, linear: Linear, x: int, saved: SavedTensors, *, value: bool, wants_x: bool
    ) -> tuple[int, Backward]:
        (y,), backward = self.fused_linears([linear], x, saved, value=value, wants_x=wants_x)
        return y, lambda grad: backward([grad])

    def fused_linears(
        self, linears: Sequence[Linear], x: int, saved: SavedTensors, *, value: bool, wants_x: bool
    ) -> tuple[list[int], Callable[[list[int]], int]]:
        """Linears that share their input, by one node: `nf4_lora_matmul.nf4_lora_matmuls`, which
        keeps its values with DoRA.
        """
        for linear in linears:
            self.norms(linear)
        low = self.low(linears)
        normed = x in self._sources
        made = [self.value(linear) if value or self._dora else -1 for linear in linears]
        kept = [self._sources.get(x, x), low, *(made if self._dora else ())]
        handles = [saved.pack(tensor) for tensor in kept]
        self._tape.free(low)

        def backward(grads: list[int]) -> int:
            tensors = [saved.unpack(handle) for handle in handles]
            grads = self._of_directions(linears, grads)
            of_low = self.low_gradient(linears)
            self.adapter_gradients(linears, normed=normed)
            grad_x = self.input_gradient(linears) if wants_x else -1
            self._tape.free(of_low, *tensors, *grads)
            return grad_x

        return made, backward

    def lengthened(
        self, linear: Linear, direction: int, saved: SavedTensors
    ) -> tuple[int, Backward]:
        """DoRA's factor as a node of its own, which keeps its value: `dora.lengthened`."""
        y = self._tape.new(self._tape.sizes[direction], WORK)
        self._tape.free(direction)
        handle = saved.pack(y)

        def backward(grad: int) -> int:
            kept = saved.unpack(handle)
            scaled, grad = self._of_directions([linear], [grad])
            self._tape.free(kept, grad)
            return scaled

        return y, backward

    def _dropped_dora(
        self, linear: Linear, saved: SavedTensors, *, wants_x: bool
    ) -> tuple[int, Backward]:
        """DoRA of a dropped input d, and W (x - d): `lora_linear.FusedLoraLinear`."""
        tape, kept = self._tape, self._input(linear)
        (y,), backward = self.fused_linears([linear], kept, saved, value=True, wants_x=True)
        rest = self._input(linear)
        tape.free(kept)
        of_rest = self._product(linear)
        tape.free(rest)

        def dropped_backward(grad: int) -> int:
            begun = self._begun_products
            of_rest = begun.pop() if begun else self._product_backward(linear)
            negative = self._input(linear)
            of_kept = self.total(backward([grad]), negative)
            tape.free(of_kept)
            grad_x = self.total(of_rest, self._input(linear))
            if wants_x:
                return grad_x
            tape.free(grad_x)
            return -1

        return self.total(y, of_rest), dropped_backward

    def begin_backward(self, linear: Linear) -> None:
        """What backward does for a layer's last linear before it asks for anything that is to be
        recomputed.
        """
        if linear.name not in self._setup.targets or (self._setup.dropout and self._dora):
            self._begun_products.append(self._product_backward(linear))
