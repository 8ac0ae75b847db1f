"""What a decoder layer asks of the allocator: attention, feed-forward, and the norms and sums
around them.

Written from the decoder layers of Transformers 5.23 and `fused_feed_forward`.
"""

from collections.abc import Callable

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear
from workflow.lib.planning.memory.allocation_tape import NotSaved, SavedTensors, Tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import fuses_feed_forward
from workflow.lib.planning.memory.trace_attention import AttentionTrace
from workflow.lib.planning.memory.trace_norms import WORK, Backward


class LayerTrace(AttentionTrace):
    """A kind of decoder layer, as one process trains it."""

    def __init__(self, tape: Tape, layer: DecoderLayer, setup: Setup, *, tokens: int) -> None:
        """tokens: of the micro-batch."""
        super().__init__(tape, layer, setup, tokens=tokens)
        self._wide = self._c * tokens * layer.intermediate_size
        self._before, self._after = layer.norms_before, layer.norms_after

    def layer(
        self, x: int, saved: SavedTensors, *, value: bool = True, wants_x: bool = True
    ) -> tuple[int, Backward]:
        """x + attention, + feed-forward; without `value` only what backward needs is made, and -1
        returned.
        """
        attended, attention_backward = self._normed(x, saved, self.attention, wants_x=wants_x)
        middle = self._sum(x, attended)
        out, feed_forward_backward = self._normed(
            middle, saved, self._feed_forward, value=value or self._after
        )
        y = self._sum(middle, out) if value else -1
        if not value and out >= 0:
            self._tape.free(out)
        self._tape.free(middle)

        def backward(grad: int) -> int:
            of_branch = feed_forward_backward(self._tape.hold(grad))
            of_middle = self.total(grad, of_branch)
            of_branch = attention_backward(self._tape.hold(of_middle))
            if of_branch < 0:
                self._tape.free(of_middle)
                return -1
            return self.total(of_middle, of_branch)

        return y, backward

    def begin_recomputation(self) -> None:
        """What backward does of a recomputed layer before it recomputes: down to the first value
        that it lacks.
        """
        if not self._after:
            self.begin_backward(self._kind.linears[-1])

    def _sum(self, residual: int, branch: int) -> int:
        """The residual's sum with a branch, which is freed."""
        y = self._tape.new(self._tape.sizes[residual], "hidden_states")
        self._tape.free(branch)
        return y

    def _normed(
        self, x: int, saved: SavedTensors, part: "Part", *, value: bool = True, wants_x: bool = True
    ) -> tuple[int, Backward]:
        """A part of the layer between its norms."""
        width, steps = self._kind.hidden_size, []
        given = self._tape.hold(x)
        if self._before:
            self._tape.free(given)
            given, back = self.norm(x, saved if wants_x else NotSaved(), width=width)
            steps.append(back)
        y, back = part(given, saved, value=value, wants_x=wants_x)
        steps.append(back)
        self._tape.free(given)
        if self._after:
            inner = y
            y, back = self.norm(inner, saved, width=width)
            steps.append(back)
            self._tape.free(inner)

        def backward(grad: int) -> int:
            for step in reversed(steps):
                if grad >= 0:
                    grad = step(grad)
            return grad

        return y, backward

    def _feed_forward(
        self, x: int, saved: SavedTensors, *, value: bool, wants_x: bool
    ) -> tuple[int, Backward]:
        """Gate, up and down; without `value` only what backward needs is made, and -1 returned for
        it.
        """
        *into, down = self._kind.feed_forward
        if fuses_feed_forward(self._kind, self._setup):
            return self._gated(x, into, down, saved, value=value)
        wide, last = self._wide, down.name not in self._setup.targets and not value
        # What the activation keeps besides the values of the linears; without a gate as with one.
        more = self._kind.feed_forward_tensors * down.in_features - sum(
            linear.out_features for linear in into
        )
        outs, backwards, activation = [], [], -1
        for linear in into:
            y, back = self.linear(linear, x, saved)
            outs.append(y)
            backwards.append(back)
            if activation < 0:  # of gate, before up is made
                activation = self._tape.new(wide, WORK)
        copies = [self._tape.new(wide, WORK) for _ in range(1, more // down.in_features)]
        kept = (*outs, activation, *copies) if more > 0 else outs
        handles = [saved.pack(y) for y in kept]
        product = -1 if last else self._tape.new(wide, WORK)
        self._tape.free(activation, *outs, *copies)
        y, down_backward = self.linear(down, product, saved, value=value)
        if product >= 0:
            self._tape.free(product)

        def backward(grad: int) -> int:
            grad_product = down_backward(grad)
            tensors = [saved.unpack(handle) for handle in handles]
            of_linears, active = tensors[: len(into)], tensors[len(into) :]
            of_activation = self._tape.new(wide, WORK)
            of_up = self._tape.new(wide, WORK)
            self._tape.free(grad_product, *active)
            if len(of_linears) == 1:  # gate and up in one: their gradients become one too
                of_gate = self._tape.new(wide, WORK)
                self._tape.free(of_activation)
                joined = self._tape.new(2 * wide, WORK)
                self._tape.free(of_gate, of_up, *of_linears)
                return backwards[0](joined)
            self._tape.free(of_linears[1])
            grad_x = backwards[1](of_up)
            of_gate = self._tape.new(wide, WORK)
            self._tape.free(of_activation, of_linears[0])
            return self.total(grad_x, backwards[0](of_gate))

        return y, backward

    def _gated(
        self, x: int, into: list[Linear], down: Linear, saved: SavedTensors, *, value: bool
    ) -> tuple[int, Backward]:
        """`fused_feed_forward.FusedFeedForward`: keeps its input, or what it was normed from, gate
        and up alone.
        """
        tape, wide = self._tape, self._wide
        for linear in (*into, down):
            self.norms(linear)
        low = self.low(into)
        outs = [self.value(linear) for linear in into]
        normed = x in self._sources
        handles = [saved.pack(tensor) for tensor in (self._sources.get(x, x), *outs, low)]
        tape.free(low)
        y = -1
        if value or self._dora:
            product = tape.new(wide, WORK)
            low = self.low([down])
            y = self.value(down)
            tape.free(low, product)
        tape.free(*outs)
        lengthen = None
        if self._dora:
            y, lengthen = self.lengthened(down, y, saved)

        def backward(grad: int) -> int:
            grad = lengthen(grad) if lengthen else grad
            tensors = [saved.unpack(handle) for handle in handles]
            of_low = self.low_gradient([down])
            # its gradient; a kernel makes it the product, gate and up theirs
            product = self.input_gradient([down])
            for linear in into if self._dora else ():
                self._gradient(linear.out_features)
            low = self.low([down], drops=False)  # from the product, which has been dropped from
            self.adapter_gradients([down], drops=False)
            tape.free(low, product)
            of_lows = self.low_gradient(into)
            tape.free(of_low)
            self.adapter_gradients(into, normed=normed)
            grad_x = self.input_gradient(into)
            tape.free(of_lows, *tensors, grad)
            return grad_x

        return y, backward


Part = Callable[..., tuple[int, Backward]]
