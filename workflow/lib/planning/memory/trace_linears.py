"""What the linears of a decoder layer ask of the allocator, operation by operation, forward and
backward.

Written from what runs: PEFT's layers, `nf4`, `lora_products`, `fused` and `dora`, and the kernels
of torch and bitsandbytes that they call; compared with a record of all tensors that they made. What
an operation borrows and makes, `trace_norms` says.
"""

import math
from collections.abc import Callable, Sequence

from workflow.lib.model.architecture.model_shape import Linear, ModelShape
from workflow.lib.planning.memory.allocation_tape import SavedTensors, Tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.trace_norms import WORK, Backward, NormTrace

WEIGHT = "dequantized_weight"
DORA_CHUNKS = 8  # `dora.GRADIENT_CHUNKS`, which stands beside an import of torch


class LinearTrace(NormTrace):
    """The linears of a model's layers, as one process runs them."""

    def __init__(self, tape: Tape, shape: ModelShape, setup: Setup, *, tokens: int) -> None:
        """tokens: of the micro-batch."""
        super().__init__(tape, shape, setup, tokens=tokens)
        self._begun: list[tuple[int, int]] = []
        self._begun_products: list[int] = []
        self._gradients: list[int] = []  # of the adapters, fp32, whole, in backward's order

    def pop_gradients(self) -> list[int]:
        """Return the adapters' gradients since the last call, fp32, whole, in backward's order."""
        gradients, self._gradients = self._gradients, []
        return gradients

    def dequantized(self, linear: Linear) -> int:
        """A weight in the compute type, decoded by one kernel (`kernels`)."""
        return self._tape.new(self._c * linear.num_weights, WEIGHT)

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
        if self._setup.dropout:
            return self._peft_linear(linear, x, saved, value=value, wants_x=wants_x)
        y, backward = self._fused_linear(
            linear, x, saved, value=value or self._setup.dora, wants_x=wants_x
        )
        if self._setup.dora:
            return self._scaled(linear, y, backward, saved)
        return y, backward

    def _frozen_backward(self, linear: Linear, grad: int, *, wants_x: bool) -> int:
        grad_x = self._begun_products.pop() if self._begun_products else -1
        if wants_x and grad_x < 0:
            grad_x = self._product_backward(linear)
        self._tape.free(grad)
        return grad_x

    def low(self, linears: Sequence[Linear]) -> int:
        """A x of all linears, (T, sum of ranks): `lora_products.low_rank`."""
        stacked = self._stacked(linears)
        low = self._tape.new(self._c * self._tokens * self._ranks(linears), WORK)
        self._tape.free(stacked)
        return low

    def _ranks(self, linears: Sequence[Linear]) -> int:
        return sum(self._setup.rank_of(linear.name) for linear in linears)

    def _stacked(self, linears: Sequence[Linear]) -> int:
        """A of all linears in one matrix, in the compute type."""
        elements = self._ranks(linears) * linears[0].in_features
        whole = [self._tape.new(4 * elements, WORK)] if len(linears) > 1 else []
        stacked = self._tape.new(self._c * elements, WORK)
        self._tape.free(*whole)
        return stacked

    def _cast(self, linear: Linear) -> int:
        """B in the compute type."""
        rank = self._setup.rank_of(linear.name)
        return self._tape.new(self._c * rank * linear.out_features, WORK)

    def value(self, linear: Linear) -> int:
        """s B u, to which W x is added: `lora_products.value`."""
        cast = self._cast(linear)
        y = self._tape.new(self._c * self._tokens * linear.out_features, WORK)
        self._tape.free(self.dequantized(linear), cast)
        return y

    def _fused_linear(
        self, linear: Linear, x: int, saved: SavedTensors, *, value: bool, wants_x: bool
    ) -> tuple[int, Backward]:
        (y,), backward = self.fused_linears([linear], x, saved, value=value, wants_x=wants_x)
        return y, lambda grad: backward([grad])

    def fused_linears(
        self, linears: Sequence[Linear], x: int, saved: SavedTensors, *, value: bool, wants_x: bool
    ) -> tuple[list[int], Callable[[list[int]], int]]:
        """Linears that share their input, by one node: `nf4_lora_matmul.nf4_lora_matmuls`."""
        low = self.low(linears)
        normed = x in self._sources
        handles = [saved.pack(self._sources.get(x, x)), saved.pack(low)]
        outputs = [self.value(linear) if value else -1 for linear in linears]
        self._tape.free(low)

        def backward(grads: list[int]) -> int:
            tensors = [saved.unpack(handle) for handle in handles]
            of_low = self.low_gradient(linears)
            self.adapter_gradients(linears, normed=normed)
            grad_x = self.input_gradient(linears) if wants_x else -1
            self._tape.free(of_low, *tensors, *grads)
            return grad_x

        return outputs, backward

    def low_gradient(self, linears: Sequence[Linear]) -> int:
        """`lora_products.low_gradient`: (T, sum of ranks)."""
        size = self._c * self._tokens * self._ranks(linears)
        if len(linears) == 1:
            cast = self._cast(linears[0])
            of_low = self._tape.new(size, WORK)
            self._tape.free(cast)
            return of_low
        of_low = self._tape.new(size, WORK)
        for linear in linears:
            self._tape.free(self._cast(linear))
        return of_low

    def adapter_gradients(self, linears: Sequence[Linear], *, normed: bool = False) -> None:
        """`lora_products.adapter_gradients`: added to the list. normed: their input is made again
        for it.
        """
        again = []
        if normed:
            size = self._c * self._tokens * linears[0].in_features
            again = [self._tape.new(size, WORK)]
            self._tape.moment(4 * self._tokens, WORK)
        self._gradient(self._ranks(linears) * linears[0].in_features)
        for linear in linears:
            self._gradient(self._setup.rank_of(linear.name) * linear.out_features)
        self._tape.free(*again)

    def input_gradient(self, linears: Sequence[Linear]) -> int:
        """`lora_products.input_gradient`."""
        stacked = self._stacked(linears)
        grad_x = self._tape.new(self._c * self._tokens * linears[0].in_features, WORK)
        self._tape.free(stacked)
        for linear in linears:
            self._tape.free(self.dequantized(linear))
        return grad_x

    def _gradient(self, elements: int) -> None:
        self._gradients.append(self._tape.new(4 * elements, "gathered_gradients"))

    def _scaled(
        self, linear: Linear, product: int, backward: Backward, saved: SavedTensors
    ) -> tuple[int, Backward]:
        """DoRA: the product times a factor, which takes the lengths of the rows of W + B A."""
        tape, size = self._tape, self._c * self._tokens * linear.out_features
        tape.free(self.dequantized(linear))
        handle = saved.pack(product)
        y = tape.new(size, WORK)
        tape.free(product)

        def scaled_backward(grad: int) -> int:
            unscaled = saved.unpack(handle)
            rows = math.ceil(self._tokens / DORA_CHUNKS)
            tape.moment(4 * rows * linear.out_features, WORK)  # for the factor's gradient
            of_product = tape.new(size, WORK)
            tape.free(unscaled, grad)
            self._gradient(linear.out_features)
            return backward(of_product)

        return y, scaled_backward

    def _peft_linear(
        self, linear: Linear, x: int, saved: SavedTensors, *, value: bool, wants_x: bool
    ) -> tuple[int, Backward]:
        """PEFT's own forward, with dropout: the adapter computes in fp32 on a copy of the input."""
        tape, t = self._tape, self._tokens
        rank = self._setup.rank_of(linear.name)
        base = self._product(linear)
        x32 = tape.new(4 * t * linear.in_features, WORK)
        dropped = tape.new(4 * t * linear.in_features, WORK)
        mask = tape.new(t * linear.in_features, WORK)
        low = tape.new(4 * t * rank, WORK)
        handles = [saved.pack(mask), saved.pack(dropped), saved.pack(low)]
        tape.free(mask, dropped, low)
        y = -1
        if value:
            wide = 4 * t * linear.out_features
            update = tape.new(wide, WORK)
            scaled = tape.new(wide, WORK)
            tape.free(update)
            total = tape.new(wide, WORK)
            tape.free(scaled, base)
            y = tape.new(self._c * t * linear.out_features, WORK)
            tape.free(total)
        else:
            tape.free(base)
        tape.free(x32)
        return y, lambda grad: self._peft_backward(linear, grad, saved, handles, wants_x=wants_x)

    def _peft_backward(
        self, linear: Linear, grad: int, saved: SavedTensors, handles: list[int], *, wants_x: bool
    ) -> int:
        tape, t = self._tape, self._tokens
        rank, wide_in = self._setup.rank_of(linear.name), 4 * t * linear.in_features
        of_base, scaled = self._begun.pop() if self._begun else self._peft_gradients(linear)
        tape.free(grad)
        mask, dropped, low = (saved.unpack(handle) for handle in handles)
        self._gradient(rank * linear.out_features)
        grad_low = tape.new(4 * t * rank, WORK)
        tape.free(scaled, low)
        self._gradient(rank * linear.in_features)
        if not wants_x:
            tape.free(grad_low, dropped, mask, of_base)
            return -1
        unmasked = tape.new(wide_in, WORK)
        tape.free(grad_low, dropped)
        masked = tape.new(wide_in, WORK)
        tape.free(unmasked, mask)
        of_adapter = tape.new(self._c * t * linear.in_features, WORK)
        tape.free(masked)
        of_product = self._product_backward(linear)
        tape.free(of_base)
        return self.total(of_adapter, of_product)

    def begin_backward(self, linear: Linear) -> None:
        """What backward does for a layer's last linear before it asks for anything that is to be
        recomputed.
        """
        if linear.name not in self._setup.targets:
            self._begun_products.append(self._product_backward(linear))
        elif self._setup.dropout:
            self._begun.append(self._peft_gradients(linear))

    def _peft_gradients(self, linear: Linear) -> tuple[int, int]:
        """The gradient of the base's product, and that of the adapter's, fp32."""
        tape, outputs = self._tape, self._tokens * linear.out_features
        wide = tape.new(4 * outputs, WORK)
        of_base = tape.new(self._c * outputs, WORK)
        scaled = tape.new(4 * outputs, WORK)
        tape.free(wide)
        return of_base, scaled
