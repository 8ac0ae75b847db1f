"""What adapters ask of the allocator beside the products of their linears: casts, masks, row norms,
gradients.

Written from what runs: `lora_products`, `adapter_dropout`, `adapter_state` and `dora`. What an
operation borrows and makes, `trace_norms` says.
"""

from collections.abc import Sequence

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear
from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import decoded_linear
from workflow.lib.planning.memory.trace_norms import WORK, NormTrace

WEIGHT, CASTS, ROW_NORMS = "dequantized_weight", "adapter_casts", "row_norms"


class AdapterTrace(NormTrace):
    """The adapters of a kind of layer, as one process runs them."""

    def __init__(self, tape: Tape, layer: DecoderLayer, setup: Setup, *, tokens: int) -> None:
        """tokens: of the micro-batch."""
        super().__init__(tape, layer, setup, tokens=tokens)
        self._gradients: list[int] = []  # of the adapters, fp32, whole, in backward's order
        self._dora = setup.dora
        # PEFT drops from the input of W, too, with DoRA: nodes are given what was dropped from.
        self._drops = setup.dropout and not setup.dora
        self.layer_number = 0
        """Of the layer that is computed."""
        self._kept: dict[tuple[str, ...], int] | None = None

    def pop_gradients(self) -> list[int]:
        """Return the adapters' gradients since the last call, fp32, whole, in backward's order."""
        gradients, self._gradients = self._gradients, []
        return gradients

    def begin_step(self) -> None:
        """From now on adapters do not change: what is made of them is kept
        (`adapter_state.AdapterState.unchanged`).
        """
        self._kept = {}

    def end_step(self) -> None:
        """Give up what was kept."""
        self._tape.free(*(self._kept or {}).values())
        self._kept = None

    def _once(self, num_bytes: int, term: str, *names: str) -> int:
        """A tensor that is made of adapters and kept within a step."""
        key = (str(self.layer_number), term, *names)
        if self._kept is None:
            return self._tape.new(num_bytes, WORK)
        if key not in self._kept:
            self._kept[key] = self._tape.new(num_bytes, term)
        return self._tape.hold(self._kept[key])

    def dequantized(self, linear: Linear) -> int:
        """A weight as a product uses it, and what is rounded beside it in 8 bits."""
        return self._tape.new(decoded_linear(linear, self._setup), WEIGHT)

    def low(self, linears: Sequence[Linear], *, drops: bool | None = None) -> int:
        """A d(x) of all linears, (T, sum of ranks): `lora_products.low_rank`."""
        drops = self._drops if drops is None else drops
        size = self._c * self._tokens * self._ranks(linears)
        if not drops:
            stacked = self._stacked(linears)
            low = self._tape.new(size, WORK)
            self._tape.free(*stacked)
            return low
        low = self._tape.new(size, WORK)
        for linear in linears:
            dropped = self._input(linear)
            self._tape.free(dropped, *self._stacked([linear]))
        return low

    def _input(self, linear: Linear) -> int:
        """A tensor like a linear's input."""
        return self._tape.new(self._c * self._tokens * linear.in_features, WORK)

    def _ranks(self, linears: Sequence[Linear]) -> int:
        return sum(self._setup.rank_of(linear.name) for linear in linears)

    def _stacked(self, linears: Sequence[Linear]) -> list[int]:
        """A of all linears in one matrix, in the compute type; none where it is A itself."""
        elements = self._ranks(linears) * linears[0].in_features
        whole = [self._tape.new(4 * elements, WORK)] if self._must_stack(linears) else []
        stacked = self._made_of_adapters(elements, "A", linears, stacks=len(linears) > 1)
        self._tape.free(*whole)
        return stacked

    def _must_stack(self, linears: Sequence[Linear]) -> bool:
        key = (str(self.layer_number), CASTS, "A", *(linear.name for linear in linears))
        return len(linears) > 1 and self._c < 4 and key not in (self._kept or {})

    def _cast(self, linear: Linear) -> list[int]:
        """B in the compute type; none where it is B itself."""
        rank = self._setup.rank_of(linear.name)
        return self._made_of_adapters(rank * linear.out_features, "B", [linear])

    def _made_of_adapters(
        self, elements: int, name: str, linears: Sequence[Linear], *, stacks: bool = False
    ) -> list[int]:
        """Elements of adapters in the compute type. Several processes gather adapters for each use,
        and make them anew.
        """
        if self._c == 4 and not stacks:
            return []
        if self._setup.processes > 1:
            return [self._tape.new(self._c * elements, WORK)]
        names = (linear.name for linear in linears)
        return [self._once(self._c * elements, CASTS, name, *names)]

    def value(self, linear: Linear) -> int:
        """s B u, to which W x is added: `lora_products.value`."""
        cast = self._cast(linear)
        y = self._tape.new(self._c * self._tokens * linear.out_features, WORK)
        self._tape.free(self.dequantized(linear), *cast)
        return y

    def norms(self, linear: Linear) -> None:
        """DoRA's row norms of W + s B A, made once a step: `dora.direction_norms`."""
        if not self._dora:
            return
        key = (str(self.layer_number), ROW_NORMS, linear.name)
        if key not in (self._kept or {}):
            self._tape.free(self.dequantized(linear))
        self._tape.free(self._once(4 * linear.out_features, ROW_NORMS, linear.name))

    def _of_directions(self, linears: Sequence[Linear], grads: list[int]) -> list[int]:
        """With DoRA the gradients times the rows' factors, while autograd holds `grads`:
        `dora.lengthen_backward`.
        """
        if not self._dora:
            return grads
        scaled = []
        for linear, grad in zip(linears, grads, strict=True):
            scaled.append(self._tape.new(self._tape.sizes[grad], WORK))
            self._gradient(linear.out_features)
        return [*scaled, *grads]

    def low_gradient(self, linears: Sequence[Linear]) -> int:
        """`lora_products.low_gradient`: (T, sum of ranks)."""
        size = self._c * self._tokens * self._ranks(linears)
        if len(linears) == 1:
            cast = self._cast(linears[0])
            of_low = self._tape.new(size, WORK)
            self._tape.free(*cast)
            return of_low
        of_low = self._tape.new(size, WORK)
        for linear in linears:
            self._tape.free(*self._cast(linear))
        return of_low

    def adapter_gradients(
        self, linears: Sequence[Linear], *, normed: bool = False, drops: bool | None = None
    ) -> None:
        """`lora_products.adapter_gradients`: added to the list. normed: their input is made again
        for it.
        """
        drops = self._drops if drops is None else drops
        again = []
        if normed:
            again = [self._input(linears[0])]
            self._tape.moment(4 * self._tokens, WORK)
        for linear in linears if drops else ():
            dropped = self._input(linear)
            self._gradient(self._setup.rank_of(linear.name) * linear.in_features)
            self._tape.free(dropped)
        if not drops:
            self._gradient(self._ranks(linears) * linears[0].in_features)
        for linear in linears:
            self._gradient(self._setup.rank_of(linear.name) * linear.out_features)
        self._tape.free(*again)

    def input_gradient(self, linears: Sequence[Linear]) -> int:
        """`lora_products.input_gradient`."""
        parts = [[linear] for linear in linears] if self._drops else [linears]
        grad_x = -1
        for part in parts:
            stacked = self._stacked(part)
            update = self._input(part[0])
            self._tape.free(*stacked)
            if grad_x < 0:
                grad_x = update
            else:
                self._tape.free(update)
        for linear in linears:
            self._tape.free(self.dequantized(linear))
        return grad_x

    def _gradient(self, elements: int) -> None:
        self._gradients.append(self._tape.new(4 * elements, "gathered_gradients"))
