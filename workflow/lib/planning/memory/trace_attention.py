"""What the attention of a decoder layer asks of the allocator, from the projections to the output.

Written from the decoder layers of Transformers 5.23 and the attention kernels of torch
(FlashAttention 2's backward has the gradient of the queries in fp32, and one of keys and values for
every query head).
"""

from collections.abc import Callable, Sequence

from workflow.lib.model.architecture.model_shape import DecoderLayer, Linear
from workflow.lib.planning.memory.allocation_tape import SavedTensors, Tape
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import fuses_projections
from workflow.lib.planning.memory.trace_linears import LinearTrace
from workflow.lib.planning.memory.trace_norms import WORK, Backward

KernelBackward = Callable[[int], tuple[int, int, int]]
"""From the gradient of the output to those of queries, keys and values."""


class AttentionTrace(LinearTrace):
    """The attention of a kind of layer, as one process runs it."""

    def __init__(self, tape: Tape, layer: DecoderLayer, setup: Setup, *, tokens: int) -> None:
        """tokens: of the micro-batch."""
        super().__init__(tape, layer, setup, tokens=tokens)
        self._q = self._c * tokens * layer.query_width
        self._k = self._c * tokens * layer.key_width
        self._scores = tokens * min(setup.seq_len, tokens) * layer.num_heads

    def attention(
        self, x: int, saved: SavedTensors, *, value: bool, wants_x: bool
    ) -> tuple[int, Backward]:
        """Projections, norms of the heads where the family has them, rotary positions, the kernel,
        the output.
        """
        into, output = self._kind.into_attention, self._kind.attention_output
        given, projections_backward = self._projected(into, x, saved, wants_x=wants_x)
        if len(given) == 2:  # the keys are the values too
            given.append(self._tape.new(self._k, WORK))
        head_backwards = []
        for index, width in enumerate(self._kind.head_norms):
            normed, back = self.norm(given[index], saved, width=width)
            self._tape.free(given[index])
            given[index] = normed
            head_backwards.append(back)
        values = given[-1]  # of fused projections values are a view of the whole
        query, key = self._rotated(self._q), self._rotated(self._k)
        self._tape.free(*given[:-1])
        attended, kernel_backward = self._kernel(query, key, values, saved)
        self._tape.free(query, key)
        y, output_backward = self.linear(output, attended, saved)
        self._tape.free(attended, values)

        def backward(grad: int) -> int:
            query, key, values = kernel_backward(output_backward(grad))
            key, query = self._unrotated(key, self._k), self._unrotated(query, self._q)
            heads = [query, key, values]
            for index, back in reversed(list(enumerate(head_backwards))):
                heads[index] = back(heads[index])
            return projections_backward(heads)

        return y, backward

    def _projected(
        self, linears: Sequence[Linear], x: int, saved: SavedTensors, *, wants_x: bool
    ) -> tuple[list[int], Callable[[list[int]], int]]:
        """Queries, keys and values, or one projection for all of them; a transposed gradient is
        copied first.
        """
        if fuses_projections(self._kind, self._setup):
            given, node_backward = self.fused_linears(
                linears, x, saved, value=True, wants_x=wants_x
            )
            return given, lambda grads: node_backward([self._copied(grad) for grad in grads])
        products = [self.linear(linear, x, saved, wants_x=wants_x) for linear in linears]
        backwards = [backward for _, backward in products]
        return [y for y, _ in products], lambda grads: self._through_projections(grads, backwards)

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
        if len(backwards) == 2:
            grads = [grads[0], self.total(grads[1], grads[2])]
        total = -1
        for index in reversed(range(len(backwards))):
            grad_x = backwards[index](self._copied(grads[index]))
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
        self, query: int, key: int, values: int, saved: SavedTensors
    ) -> tuple[int, KernelBackward]:
        attention = self._setup.attention
        if attention == "eager":
            return self._eager(query, key, values, saved)
        if attention == "flex":
            return self._flex(query, key, values, saved)
        tape, statistics = self._tape, 4 * self._tokens * self._kind.num_heads
        repeated = attention == "sdpa" and self._q != self._k
        if repeated:  # a mask makes Transformers repeat the heads
            key, values = tape.new(self._q, WORK), tape.new(self._q, WORK)
        given = [query, key, values]
        if attention == "sdpa":
            mask = self._scores // self._kind.num_heads
            given.append(tape.new(self._c * mask, "attention_mask"))
        attended, sums = tape.new(self._q, WORK), tape.new(statistics, WORK)
        handles = [saved.pack(tensor) for tensor in (*given, attended, sums)]
        tape.free(sums, *given[1 if repeated else 3 :])
        return attended, lambda grad: self._kernel_backward(grad, saved, handles, repeated=repeated)

    def _flex(
        self, query: int, key: int, values: int, saved: SavedTensors
    ) -> tuple[int, KernelBackward]:
        """As torch 2.11 compiles flex_attention: two numbers a query in forward, one of them kept;
        in backward one more, and gradients of as many heads as there are.
        """
        tape, statistics = self._tape, 4 * self._tokens * self._kind.num_heads
        attended, sums = tape.new(self._q, WORK), tape.new(statistics, WORK)
        tape.moment(statistics, WORK)
        handles = [saved.pack(tensor) for tensor in (query, key, values, attended, sums)]
        tape.free(sums)

        def backward(grad: int) -> tuple[int, int, int]:
            tensors = [saved.unpack(handle) for handle in handles]
            products = tape.new(statistics, WORK)  # of gradient and output
            of_query, of_key, of_values = (
                tape.new(size, WORK) for size in (self._q, self._k, self._k)
            )
            tape.free(products, grad, *tensors)
            return of_query, of_key, of_values

        return attended, backward

    def _kernel_backward(
        self, grad: int, saved: SavedTensors, handles: list[int], *, repeated: bool
    ) -> tuple[int, int, int]:
        tape, kind = self._tape, self._kind
        tensors = [saved.unpack(handle) for handle in handles]
        wide_keys = self._q if repeated else self._k
        grads = [tape.new(size, WORK) for size in (self._q, wide_keys, wide_keys)]
        sums = tape.new(4 * self._tokens * kind.num_heads, WORK)
        work = [sums, tape.new(4 * self._q // self._c, WORK)]
        if self._q != self._k and not repeated:
            work += [tape.new(self._q, WORK), tape.new(self._q, WORK)]
        tape.free(*work, grad, *tensors)
        indices = (2, 1) if repeated else (2, 1, 0)
        for index in indices:  # from [0], or from repeated heads
            narrow = self._k if index else self._q
            copy = tape.new(narrow, WORK)
            tape.free(grads[index])
            grads[index] = copy
        return grads[0], grads[1], grads[2]

    def _eager(
        self, query: int, key: int, values: int, saved: SavedTensors
    ) -> tuple[int, KernelBackward]:
        """Scores in the compute type, their softmax in fp32; soft-capping keeps its tanh."""
        tape, low, wide = self._tape, self._c * self._scores, 4 * self._scores
        repeated = self._q != self._k
        if repeated:
            key, values = tape.new(self._q, WORK), tape.new(self._q, WORK)
        tanh: list[int] = []
        products = tape.new(low, WORK)
        scaled = tape.new(low, WORK)
        tape.free(products)
        if self._kind.attention_softcap:
            scaled, tanh = self._capped(scaled, saved)
        masked = tape.new(low, WORK)
        tape.free(scaled)
        converted = tape.new(wide, WORK)
        softmax = tape.new(wide, WORK)
        tape.free(converted)
        weights = tape.new(low, WORK)
        tape.free(masked)
        attended = tape.new(self._q, WORK)
        handles = [saved.pack(tensor) for tensor in (query, key, values, softmax, weights)]
        tape.free(softmax, weights, *((key, values) if repeated else ()))
        handles += tanh
        return attended, lambda grad: self._eager_backward(grad, saved, handles, repeated=repeated)

    def _capped(self, scores: int, saved: SavedTensors) -> tuple[int, list[int]]:
        """Scores divided by the cap, their tanh, times the cap; and the tanh, which autograd
        keeps.
        """
        tape, low = self._tape, self._c * self._scores
        divided = tape.new(low, WORK)
        tape.free(scores)
        tanh = tape.new(low, WORK)
        tape.free(divided)
        handle = saved.pack(tanh)
        capped = tape.new(low, WORK)
        tape.free(tanh)
        return capped, [handle]

    def _eager_backward(
        self, grad: int, saved: SavedTensors, handles: list[int], *, repeated: bool
    ) -> tuple[int, int, int]:
        tape, low, wide = self._tape, self._c * self._scores, 4 * self._scores
        query, key, values, softmax, weights, *tanh = (saved.unpack(handle) for handle in handles)
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
        for index in (2, 1) if repeated else ():
            copy = tape.new(self._k, WORK)
            tape.free(grads[index])
            grads[index] = copy
        return grads[0], grads[1], grads[2]
