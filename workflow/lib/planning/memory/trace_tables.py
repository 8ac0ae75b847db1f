"""What embedding and head ask of the allocator: the rows of a micro-batch, the loss in chunks of
rows, and the gradients of tables that are trained whole.

With several processes each has a slice of both tables, and rows are exchanged
(`vocabulary_parallel`).
"""

import math

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.vocabulary_slices import chunk_rows, exchanged_rows
from workflow.lib.planning.memory.allocation_tape import NotSaved, SavedTensors, Tape
from workflow.lib.planning.memory.loss_terms import gradient_piece
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import table_slice
from workflow.lib.planning.memory.trace_layer import LayerTrace
from workflow.lib.planning.memory.trace_norms import WORK, Backward


class ModuleGradients:
    """Gradients of embedding and head, each of its own name, over the micro-batches of a step."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._gradients: dict[str, int] = {}

    def add(self, module: str, gradient: int) -> None:
        """Take a micro-batch's gradient of a module, or add it to the one of earlier
        micro-batches.
        """
        if module in self._gradients:
            self._tape.free(gradient)
        else:
            self._gradients[module] = gradient

    def drop(self) -> None:
        """After the optimizer's step."""
        self._tape.free(*self._gradients.values())
        self._gradients.clear()


class EmbeddingTrace:
    """The embedding of a model, for micro-batches of one size."""

    def __init__(
        self, tape: Tape, shape: ModelShape, setup: Setup, gradients: ModuleGradients
    ) -> None:
        self._tape, self._shape, self._setup = tape, shape, setup
        self._gradients = gradients
        self._hidden = setup.compute_bytes * setup.tokens * shape.hidden_size
        self._caller_rows: list[int] = []

    def forward(self) -> int:
        """Rows of the embedding: of the batch, exchanged, or looked up at once; the family's own
        embedding runs on them.
        """
        tape, setup = self._tape, self._setup
        if setup.shards == 1 and not setup.offload_embedding and not setup.trains_embedding:
            return tape.new(self._hidden, "hidden_states")
        whole = []
        if not setup.offload_embedding:
            rows = self._exchanged_rows()
            whole = [tape.new(self._hidden, "hidden_states")]
            tape.free(*rows)
        row_numbers = tape.new(8 * setup.tokens, WORK)
        embedded = tape.new(self._hidden, "hidden_states")
        tape.free(row_numbers, *whole)
        self._caller_rows = [tape.hold(embedded)]  # the decoder's argument, held by its caller
        return embedded

    def end_decoder(self) -> None:
        """The decoder's caller frees its argument."""
        self._tape.free(*self._caller_rows)
        self._caller_rows = []

    def _exchanged_rows(self) -> list[int]:
        tape, row = self._tape, self._setup.compute_bytes * self._shape.hidden_size
        if self._setup.slices == 1:  # of a trained table, in fp32
            return [tape.new(4 * self._setup.tokens * self._shape.hidden_size, "hidden_states")]
        rows = []
        for count in _chunks(self._setup.tokens, exchanged_rows(self._setup.slices)):
            everyone = tape.new(self._setup.slices * count * row, "gathered_rows")
            if self._setup.trains_embedding:
                tape.moment(
                    self._setup.slices * count * 4 * self._shape.hidden_size, "gathered_rows"
                )
            rows.append(tape.new(count * row, "hidden_states"))
            tape.free(everyone)
        return rows

    def backward(self, grad: int) -> None:
        """Of the family's embedding, then of the rows that it was given; frees `grad`."""
        tape, setup, h = self._tape, self._setup, self._shape.hidden_size
        master = table_slice(self._shape, setup, width=4)
        rows = tape.new(self._hidden, "hidden_states")
        tape.free(grad)
        if setup.slices == 1:
            wide = tape.new(4 * setup.tokens * h, "hidden_states")
            tape.free(rows)
            table = tape.new(master, "module_gradients")
            tape.free(wide)
        else:
            table = tape.new(master, "module_gradients")
            for count in _chunks(setup.tokens, exchanged_rows(setup.slices)):
                elements = setup.slices * count * h
                sizes = (setup.compute_bytes * elements, 4 * elements, 4 * elements)
                travelling = [tape.new(size, "gathered_rows") for size in sizes]
                tape.free(*travelling)
            tape.free(rows)
        self._gradients.add("embedding", table)


class LossTrace:
    """The final norm, the head and the loss of a model, for micro-batches of one size."""

    def __init__(
        self,
        tape: Tape,
        shape: ModelShape,
        setup: Setup,
        layer: LayerTrace,
        gradients: ModuleGradients,
    ) -> None:
        """layer: runs the norm."""
        self._tape, self._shape, self._setup = tape, shape, setup
        self._layer, self._gradients = layer, gradients
        self._hidden = setup.compute_bytes * setup.tokens * shape.hidden_size

    def forward(self, x: int, saved: SavedTensors, embedding: EmbeddingTrace) -> Backward:
        """The final norm and the loss with its gradient, in forward; frees `x`."""
        tape = self._tape
        hidden, norm_backward = self._layer.plain_norm(x, saved, width=self._shape.hidden_size)
        tape.free(x)
        chosen = tape.new(self._hidden, "hidden_states")
        grad_chosen = tape.new(self._hidden, "hidden_states")
        chunk = self._sliced_chunk if self._setup.slices > 1 else self._chunk
        trained = self._begin_head_gradient(saved)
        grads: list[int] = []  # of the chunk before, which is held until the next one's is there
        size = chunk_rows(self._setup.slices, vocab_size=self._shape.vocab_size)
        for rows in _chunks(self._setup.tokens, size):
            grads.append(chunk(rows))
            tape.free(*grads[:-1])
            del grads[:-1]
        tape.free(hidden, chosen, *grads)
        embedding.end_decoder()
        tape.free(*trained[1:])

        def backward(_: int) -> int:
            if trained:
                self._gradients.add("head", trained[0])
            grad = tape.new(self._hidden, "hidden_states")
            tape.free(grad_chosen)
            return norm_backward(grad)

        if isinstance(saved, NotSaved):
            tape.free(grad_chosen)
        return backward

    def _begin_head_gradient(self, saved: SavedTensors) -> list[int]:
        """`chunked_loss.TrainedHead`: the gradient, and the copy in the compute type; nothing of a
        frozen head, or where no gradient is made.
        """
        if not self._setup.trains_head or isinstance(saved, NotSaved):
            return []
        c = self._setup.compute_bytes
        copy = [table_slice(self._shape, self._setup, width=c)] if c < 4 else []
        copies = [self._tape.new(size, "module_workspace") for size in copy]
        master = table_slice(self._shape, self._setup, width=4)
        return [self._tape.new(master, "module_gradients"), *copies]

    def _chunk(self, rows: int) -> int:
        """`LinearCrossEntropy.chunk_loss`: log-softmax and its gradient, in fp32; returns the
        gradient of the rows.
        """
        tape, c = self._tape, self._setup.compute_bytes
        wide, low = 4 * rows * self._shape.vocab_size, c * rows * self._shape.vocab_size
        product = tape.new(low, "logits")
        logits = tape.new(wide, "logits")
        held_product = self._held_product(product)
        cap = [tape.new(wide, "logits")] if self._shape.logit_softcap else []
        log_softmax = tape.new(wide, "logits")
        tape.free(logits)
        slope = tape.new(wide, "logits")
        of_logits = tape.new(wide, "logits")
        tape.free(slope, log_softmax)
        of_product = tape.new(low, "logits")
        tape.free(of_logits, *cap)
        self._add_piece()
        grad = tape.new(c * rows * self._shape.hidden_size, "hidden_states")
        tape.free(of_product, *held_product)
        return grad

    def _held_product(self, product: int) -> list[int]:
        """The head's product, which the gradient of a trained head is made from; that of a frozen
        one is freed.
        """
        if self._setup.trains_head:
            return [product]
        self._tape.free(product)
        return []

    def _add_piece(self) -> None:
        if self._setup.trains_head:
            self._tape.moment(gradient_piece(self._shape, self._setup), "module_workspace")

    def _sliced_chunk(self, rows: int) -> int:
        """`SlicedCrossEntropy.chunk_loss`: the rows of all slices, and this slice's logits, which
        become probabilities in place.
        """
        tape, c, h = self._tape, self._setup.compute_bytes, self._shape.hidden_size
        everyone = rows * self._setup.slices
        columns = math.ceil(self._shape.vocab_size / self._setup.slices)
        states = tape.new(c * everyone * h, "gathered_rows")
        product = tape.new(c * everyone * columns, "logits")
        logits = tape.new(4 * everyone * columns, "logits")
        held_product = self._held_product(product)
        cap = [tape.new(4 * everyone * columns, "logits")] if self._shape.logit_softcap else []
        tape.moment(4 * everyone * columns, "logits")
        of_product = tape.new(c * everyone * columns, "logits")
        tape.free(*cap)
        self._add_piece()
        low = tape.new(c * everyone * h, "gathered_rows")
        tape.free(of_product)
        grad = tape.new(4 * everyone * h, "gathered_rows")
        tape.free(low)
        own = tape.new(4 * rows * h, "gathered_rows")
        tape.free(states, logits, grad, *held_product)
        return own


def _chunks(rows: int, size: int) -> list[int]:
    """Return the sizes of the pieces of `rows` rows."""
    return [min(size, rows - start) for start in range(0, rows, size)]
