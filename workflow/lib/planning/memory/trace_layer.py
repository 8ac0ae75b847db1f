"""What a decoder layer asks of the allocator: attention, feed-forward, and the norms and sums
around them.

Written from the decoder layers of Transformers 5.23, `fused_feed_forward`, and the attention
kernels of torch (FlashAttention 2's backward has the gradient of the queries in fp32, and one of
keys and values for every query head).
"""

from collections.abc import Callable

from workflow.lib.model.architecture.model_shape import Linear, ModelShape
from workflow.lib.planning.memory.allocation_tape import Dropped, Keeper, Tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import fuses_feed_forward, fuses_projections
from workflow.lib.planning.memory.trace_linears import WORK, Backward, LinearTrace

ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
)  # the other linears are the feed-forward's


class LayerTrace(LinearTrace):
    """A decoder layer of a model, as one process trains it; all layers are alike."""

    def __init__(self, tape: Tape, shape: ModelShape, setup: Setup, *, tokens: int) -> None:
        """tokens: of the micro-batch."""
        super().__init__(tape, shape, setup, tokens=tokens)
        self._wide = self._c * tokens * shape.intermediate_size
        self._q = self._c * tokens * shape.num_heads * shape.head_dim
        self._k = self._c * tokens * shape.num_kv_heads * shape.head_dim
        self._hidden = self._c * tokens * shape.hidden_size
        self._scores = tokens * min(setup.seq_len, tokens) * shape.num_heads
        self._before = shape.family != "olmo2"  # norms before attention and feed-forward
        self._after = shape.hidden_norms == 4 or not self._before

    def layer(
        self, x: int, keep: Keeper, *, value: bool = True, wants_x: bool = True
    ) -> tuple[int, Backward]:
        """x + attention, + feed-forward; without `value` only what backward needs is made, and -1
        returned.
        """
        attended, attention_backward = self._normed(x, keep, self._attention, wants_x=wants_x)
        middle = self._sum(x, attended)
        out, feed_forward_backward = self._normed(
            middle, keep, self._feed_forward, value=value or self._after
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
            self.begin_backward(self._shape.linears[-1])

    def _sum(self, residual: int, branch: int) -> int:
        """The residual's sum with a branch, which is let go."""
        y = self._tape.new(self._tape.sizes[residual], "hidden_states")
        self._tape.free(branch)
        return y

    def _normed(
        self, x: int, keep: Keeper, part: "Part", *, value: bool = True, wants_x: bool = True
    ) -> tuple[int, Backward]:
        """A part of the layer between its norms."""
        width, steps = self._shape.hidden_size, []
        given = self._tape.hold(x)
        if self._before:
            self._tape.free(given)
            given, back = self.norm(x, keep if wants_x else Dropped(), width=width)
            steps.append(back)
        y, back = part(given, keep, value=value, wants_x=wants_x)
        steps.append(back)
        self._tape.free(given)
        if self._after:
            inner = y
            y, back = self.norm(inner, keep, width=width)
            steps.append(back)
            self._tape.free(inner)

        def backward(grad: int) -> int:
            for step in reversed(steps):
                if grad >= 0:
                    grad = step(grad)
            return grad

        return y, backward

    # ---- feed-forward ----

    def _feed_forward(
        self, x: int, keep: Keeper, *, value: bool, wants_x: bool
    ) -> tuple[int, Backward]:
        """Gate, up and down; without `value` only what backward needs is made, and -1 returned for
        it.
        """
        *into, down = [x for x in self._shape.linears if x.name not in ATTENTION]
        if fuses_feed_forward(self._shape, self._setup):
            return self._gated(x, into, down, keep, value=value)
        wide, last = self._wide, down.name not in self._setup.targets and not value
        outs, backwards, activation = [], [], -1
        for linear in into:
            y, back = self.linear(linear, x, keep)
            outs.append(y)
            backwards.append(back)
            if activation < 0:  # of gate, before up is made
                activation = self._tape.new(wide, WORK)
        kept = [keep.keep(y) for y in (*outs, activation)]
        product = -1 if last else self._tape.new(wide, WORK)
        self._tape.free(activation, *outs)
        y, down_backward = self.linear(down, product, keep, value=value)
        if product >= 0:
            self._tape.free(product)

        def backward(grad: int) -> int:
            grad_product = down_backward(grad)
            *of_linears, active = (keep.take(k) for k in kept)
            of_activation = self._tape.new(wide, WORK)
            of_up = self._tape.new(wide, WORK)
            self._tape.free(grad_product, active)
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
        self, x: int, into: list[Linear], down: Linear, keep: Keeper, *, value: bool
    ) -> tuple[int, Backward]:
        """`fused_feed_forward.GatedFeedForward`: keeps its input, or what it was normed from, gate
        and up alone.
        """
        tape, wide = self._tape, self._wide
        low = self.low(into)
        outs = [self.value(linear) for linear in into]
        normed = x in self._sources
        kept = [keep.keep(tensor) for tensor in (self._sources.get(x, x), *outs, low)]
        tape.free(low)
        y = -1
        if value:
            product = tape.new(wide, WORK)
            low = self.low([down])
            y = self.value(down)
            tape.free(low, product)
        tape.free(*outs)

        def backward(grad: int) -> int:
            taken = [keep.take(k) for k in kept]
            of_low = self.low_gradient([down])
            # its gradient; a kernel makes it the product, gate and up theirs
            product = self.input_gradient([down])
            low = self.low([down])
            self.adapter_gradients([down])
            tape.free(low, product)
            of_lows = self.low_gradient(into)
            tape.free(of_low)
            self.adapter_gradients(into, normed=normed)
            grad_x = self.input_gradient(into)
            tape.free(of_lows, *taken, grad)
            return grad_x

        return y, backward

    # ---- attention ----

    def _attention(
        self, x: int, keep: Keeper, *, value: bool, wants_x: bool
    ) -> tuple[int, Backward]:
        """Projections, norms of the heads where the family has them, rotary positions, the kernel,
        the output.
        """
        *into, output = [x for x in self._shape.linears if x.name in ATTENTION]
        given, projections_backward = self._projected(into, x, keep, wants_x=wants_x)
        values = given[-1]  # of fused projections values are a view of the whole
        head_backwards = []
        if self._shape.qk_norm:
            for place in range(2):
                width = (self._q, self._k)[place] // self._c // self._tokens
                normed, back = self.norm(given[place], keep, width=width)
                self._tape.free(given[place])
                given[place] = normed
                head_backwards.append(back)
        query, key = self._rotated(self._q), self._rotated(self._k)
        self._tape.free(*given[:-1])
        attended, kernel_backward = self._kernel(query, key, values, keep)
        self._tape.free(query, key)
        y, output_backward = self.linear(output, attended, keep)
        self._tape.free(attended, values)

        def backward(grad: int) -> int:
            query, key, values = kernel_backward(output_backward(grad))
            key, query = self._unrotated(key, self._k), self._unrotated(query, self._q)
            heads = [query, key]
            for place, back in reversed(list(enumerate(head_backwards))):
                heads[place] = back(heads[place])
            return projections_backward([*heads, values])

        return y, backward

    def _projected(
        self, linears: list[Linear], x: int, keep: Keeper, *, wants_x: bool
    ) -> tuple[list[int], Callable[[list[int]], int]]:
        """Queries, keys and values, or one projection for all of them; a transposed gradient is
        copied first.
        """
        if fuses_projections(self._shape, self._setup):
            given, node_backward = self.fused_linears(linears, x, keep, value=True, wants_x=wants_x)
            return given, lambda grads: node_backward([self._copied(grad) for grad in grads])
        made = [self.linear(linear, x, keep, wants_x=wants_x) for linear in linears]
        backwards = [backward for _, backward in made]
        return [y for y, _ in made], lambda grads: self._through_projections(grads, backwards)

    def _copied(self, tensor: int) -> int:
        copy = self._tape.new(self._tape.sizes[tensor], WORK)
        self._tape.free(tensor)
        return copy

    def _through_projections(self, grads: list[int], backwards: list[Backward]) -> int:
        """The gradient of the input of projections one by one."""
        if len(backwards) == 1:
            whole = self._tape.new(sum(self._tape.sizes[g] for g in grads), WORK)
            self._tape.free(*grads)
            return backwards[0](whole)
        total = -1
        for place in (2, 1, 0):
            grad_x = backwards[place](self._copied(grads[place]))
            total = grad_x if total < 0 or grad_x < 0 else self.total(total, grad_x)
        return total

    def _rotated(self, size: int) -> int:
        """Heads times cosine, and their halves exchanged times sine."""
        tape = self._tape
        straight = tape.new(size, WORK)
        negative = tape.new(size // 2, WORK)
        exchanged = tape.new(size, WORK)
        tape.free(negative)
        crossed = tape.new(size, WORK)
        tape.free(exchanged)
        rotated = tape.new(size, WORK)
        tape.free(straight, crossed)
        return rotated

    def _unrotated(self, grad: int, size: int) -> int:
        """The gradient before the rotation; the halves are put in their places in tensors of
        zeros.
        """
        tape = self._tape
        crossed = tape.new(size, WORK)
        tape.moment(size // 2, WORK)
        halves = [tape.new(size, WORK), tape.new(size, WORK)]
        tape.free(crossed)
        exchanged = tape.new(size, WORK)
        tape.free(*halves)
        straight = tape.new(size, WORK)
        tape.free(grad)
        total = tape.new(size, WORK)
        tape.free(exchanged, straight)
        return total

    def _kernel(
        self, query: int, key: int, values: int, keep: Keeper
    ) -> tuple[int, "KernelBackward"]:
        attention = self._setup.attention
        if attention == "eager":
            return self._eager(query, key, values, keep)
        tape, statistics = self._tape, 4 * self._tokens * self._shape.num_heads
        repeated = attention == "sdpa" and self._q != self._k
        if repeated:  # a mask makes Transformers repeat the heads
            key, values = tape.new(self._q, WORK), tape.new(self._q, WORK)
        given = [query, key, values]
        if attention == "sdpa":
            mask = self._scores // self._shape.num_heads
            given.append(tape.new(self._c * mask, "attention_mask"))
        attended, sums = tape.new(self._q, WORK), tape.new(statistics, WORK)
        kept = [keep.keep(tensor) for tensor in (*given, attended, sums)]
        tape.free(sums, *given[1 if repeated else 3 :])
        return attended, lambda grad: self._kernel_backward(grad, keep, kept, repeated=repeated)

    def _kernel_backward(
        self, grad: int, keep: Keeper, kept: list[int], *, repeated: bool
    ) -> tuple[int, int, int]:
        tape, shape = self._tape, self._shape
        taken = [keep.take(k) for k in kept]
        wide_keys = self._q if repeated else self._k
        grads = [tape.new(size, WORK) for size in (self._q, wide_keys, wide_keys)]
        sums = tape.new(4 * self._tokens * shape.num_heads, WORK)
        work = [sums, tape.new(4 * self._q // self._c, WORK)]
        if self._q != self._k and not repeated:
            work += [tape.new(self._q, WORK), tape.new(self._q, WORK)]
        tape.free(*work, grad, *taken)
        places = (2, 1) if repeated else (2, 1, 0)
        for place in places:  # from [0], or from repeated heads
            narrow = self._k if place else self._q
            copy = tape.new(narrow, WORK)
            tape.free(grads[place])
            grads[place] = copy
        return grads[0], grads[1], grads[2]

    def _eager(
        self, query: int, key: int, values: int, keep: Keeper
    ) -> tuple[int, "KernelBackward"]:
        """Scores in the compute type, their softmax in fp32; soft-capping keeps its tanh."""
        tape, low, wide = self._tape, self._c * self._scores, 4 * self._scores
        repeated = self._q != self._k
        if repeated:
            key, values = tape.new(self._q, WORK), tape.new(self._q, WORK)
        tanh: list[int] = []
        products = tape.new(low, WORK)
        scaled = tape.new(low, WORK)
        tape.free(products)
        if self._shape.attention_softcap:
            scaled, tanh = self._capped(scaled, keep)
        masked = tape.new(low, WORK)
        tape.free(scaled)
        converted = tape.new(wide, WORK)
        softmax = tape.new(wide, WORK)
        tape.free(converted)
        weights = tape.new(low, WORK)
        tape.free(masked)
        attended = tape.new(self._q, WORK)
        kept = [keep.keep(tensor) for tensor in (query, key, values, softmax, weights)]
        tape.free(softmax, weights, *((key, values) if repeated else ()))
        kept += tanh
        return attended, lambda grad: self._eager_backward(grad, keep, kept, repeated=repeated)

    def _capped(self, scores: int, keep: Keeper) -> tuple[int, list[int]]:
        """Scores divided by the cap, their tanh, times the cap; and the tanh, which autograd
        keeps.
        """
        tape, low = self._tape, self._c * self._scores
        divided = tape.new(low, WORK)
        tape.free(scores)
        tanh = tape.new(low, WORK)
        tape.free(divided)
        kept = keep.keep(tanh)
        capped = tape.new(low, WORK)
        tape.free(tanh)
        return capped, [kept]

    def _eager_backward(
        self, grad: int, keep: Keeper, kept: list[int], *, repeated: bool
    ) -> tuple[int, int, int]:
        tape, low, wide = self._tape, self._c * self._scores, 4 * self._scores
        query, key, values, softmax, weights, *tanh = (keep.take(k) for k in kept)
        of_weights = tape.new(low, WORK)
        of_values = tape.new(self._q, WORK)
        tape.free(weights, values, grad)
        of_softmax = tape.new(wide, WORK)
        tape.free(of_weights)
        of_converted = tape.new(wide, WORK)
        tape.moment(wide, WORK)  # the kernel's product of gradient and output
        tape.free(of_softmax, softmax)
        of_masked = tape.new(low, WORK)
        tape.free(of_converted)
        for given in ([], tanh, []) if tanh else ():  # of the product, the tanh and the division
            of_scores = tape.new(low, WORK)
            tape.free(of_masked, *given)
            of_masked = of_scores
        of_products = tape.new(low, WORK)
        tape.free(of_masked)
        grads = [tape.new(self._q, WORK), tape.new(self._q, WORK), of_values]
        tape.free(of_products, query, key)
        for place in (2, 1) if repeated else ():
            copy = tape.new(self._k, WORK)
            tape.free(grads[place])
            grads[place] = copy
        return grads[0], grads[1], grads[2]


Part = Callable[..., tuple[int, Backward]]
KernelBackward = Callable[[int], tuple[int, int, int]]
