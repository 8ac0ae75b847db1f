"""What a run asks of the allocator from the loaded model to the end of its second step, in order.

The second step is the first that begins as all others do, with what the allocator has kept. Before
them lie the start-up checks, whose freed memory it keeps too, and the moments of AdamW. Every row
is taken as full and every token as trained.
"""

import math
from dataclasses import replace

from workflow.lib.model.architecture.layer_choice import spread
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.vocabulary_slices import chunk_rows, exchanged_rows
from workflow.lib.planning.memory.allocation_tape import Dropped, Keeper, Kept, Stashed, Tape
from workflow.lib.planning.memory.layer_tensors import sharded_bytes
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import (
    CODE_TABLES,
    frozen_tables,
    gradient_piece,
    layer_moments,
    layer_tensors,
    layers_of_stash,
    mask_bytes,
    module_moments,
    offload_window,
    table_slice,
)
from workflow.lib.planning.memory.trace_layer import LayerTrace
from workflow.lib.planning.memory.trace_linears import WORK, Backward
from workflow.lib.planning.memory.trace_sharding import PACKED, FetchedLayers, ShardedLayers

STEPS = 2
LOAD, CHECKS = "load", "check"  # before training


def step_trace(shape: ModelShape, setup: Setup, *, checked: bool = True) -> Tape:
    """Return the events of a process that trains a model; checked: after the start-up checks."""
    tape = Tape()
    run = _Run(tape, shape, setup)
    run.load()
    if checked:
        run.check()
    run.make_optimizer()
    for _ in range(STEPS):
        for _ in range(2 if setup.accumulates else 1):
            run.micro_batch()
        run.optimizer_step()
    return tape


class _Run:
    """The model on one process, and what it does."""

    def __init__(self, tape: Tape, shape: ModelShape, setup: Setup) -> None:
        self._tape, self._shape, self._setup = tape, shape, setup
        self._layers = ShardedLayers(tape, shape, setup)
        self._fetched = FetchedLayers(tape, shape, setup)
        self._layer = LayerTrace(tape, shape, setup, tokens=setup.tokens)
        self._hidden = setup.compute_bytes * setup.tokens * shape.hidden_size
        self._master = table_slice(shape, setup, width=4)  # of a trained table; its gradient too
        self._workspaces = 0
        self._inputs: list[int] = []
        self._looked_up: list[int] = []
        self._module_gradients: dict[str, int] = {}

    def load(self) -> None:
        """Parameters and buffers, as `materialize_` makes them."""
        tape, shape, setup = self._tape, self._shape, self._setup
        tape.phase(LOAD)
        for _ in range(frozen_tables(shape, setup)):
            tape.new(table_slice(shape, setup, width=setup.compute_bytes), "embedding_and_head")
        for _ in range(setup.trained_tables):
            tape.new(self._master, "module_weights")
        groups = layer_tensors(shape, setup).by_term
        on_host = set(spread(setup.offload_layers, shape.num_layers))
        for number in range(shape.num_layers):
            for term, tensors in groups.items():
                for tensor in tensors if not (number in on_host and term in PACKED) else ():
                    tape.new(sharded_bytes([tensor], processes=setup.shards), term)
            for size in CODE_TABLES * len(shape.linears):
                tape.new(size, "nf4_tables")

    def check(self) -> None:
        """`startup_checks.startup_checks`: a forward of one row without gradients, and every layer
        gathered and compared.
        """
        row = replace(self._setup, micro_batch_size=1)
        self._tape.phase(CHECKS)
        checked = _Run(self._tape, self._shape, row)
        checked._layers, checked._fetched = self._layers, self._fetched
        checked._start_products()
        inputs = checked._make_inputs()
        x = checked._embedded()
        tables = checked._rotary_tables()
        for number in range(self._shape.num_layers):
            x, _ = checked._forward_layer(number, x, Dropped())
        checked._loss(x, Dropped())
        self._layers.end_forward()
        self._tape.free(*tables, *inputs)
        for number in range(self._shape.num_layers):
            self._layers.check(number)
        self._workspaces = checked._workspaces

    def micro_batch(self) -> None:
        """Forward and backward."""
        tape, num_layers = self._tape, self._shape.num_layers
        inputs = self._make_inputs()
        tape.free(*self._inputs)  # the batch before is held until this one is there
        self._inputs = inputs
        tape.phase("look_up_embedding")
        keep, here = self._keeper(), Kept(tape)
        away = layers_of_stash(self._shape, self._setup)
        self._start_products()
        x = self._embedded()
        tables = self._rotary_tables()
        tape.phase("forward")
        backwards = []
        for number in range(num_layers):
            x, backward = self._forward_layer(number, x, keep if number in away else here)
            backwards.append(backward)
        tape.phase("loss")
        loss_backward = self._loss(x, keep if self._setup.offload_activations is True else here)
        self._layers.end_forward()
        tape.phase("backward")
        self._start_products()
        self._layers.gather_ahead(num_layers - 1)
        # Three measurements of GPUs, two of them of 80 layers, have one tensor more of this size,
        # to 0.6 MiB; what holds it is not known.
        stashed = isinstance(keep, Stashed)
        unexplained = [tape.new(self._hidden, "offloaded_activations")] if stashed else []
        grad = loss_backward(-1)
        for number in reversed(range(num_layers)):
            self._fetched.enter(number, following=number - 1)
            self._layers.before_backward(number)
            grad = backwards[number](grad)
            self._layers.after_backward(number, self._taken_gradients())
        self._layers.end_backward()
        tape.free(*unexplained)
        if self._setup.trains_embedding:
            self._embedding_backward(grad)
        elif grad >= 0:
            tape.free(grad)
        tape.free(*tables)

    def make_optimizer(self) -> None:
        """AdamW makes its moments at once."""
        self._tape.phase(LOAD)
        of_layer = layer_moments(self._shape, self._setup)
        tensors = of_layer * self._shape.num_layers + module_moments(self._shape, self._setup)
        for num_bytes, leaves in tensors * 2:
            if not leaves:
                self._tape.new(num_bytes, "adam_moments")

    def optimizer_step(self) -> None:
        """Gradients and the batch are let go."""
        self._tape.phase("optimizer_step")
        self._layers.drop_gradients()
        self._tape.free(*self._inputs, *self._module_gradients.values())
        self._module_gradients = {}
        self._inputs = []

    def _keeper(self) -> Keeper:
        window = offload_window(self._shape, self._setup)
        if window is None:
            return Kept(self._tape)
        return Stashed(self._tape, window_bytes=window)

    def _start_products(self) -> None:
        """cuBLAS takes a workspace for each thread that multiplies: that of forward, and
        autograd's.
        """
        if self._workspaces < 2:
            self._tape.new(self._setup.fixed.get("cublas_workspace", 0) // 2, "cublas_workspace")
            self._workspaces += 1

    def _make_inputs(self) -> list[int]:
        """Ids, positions, row indices, targets, and embedding rows from host memory."""
        sizes = [8 * self._setup.tokens] * 4 + [self._hidden] * self._setup.offload_embedding
        return [self._tape.new(size, "inputs") for size in sizes]

    def _rotary_tables(self) -> list[int]:
        """Cosine and sine, and for the plain `sdpa` and `eager` the mask of packed rows."""
        tape, width = self._tape, self._setup.tokens * self._shape.head_dim
        angles = tape.new(4 * width, WORK)
        tables = []
        for _ in range(2):
            wide = tape.new(4 * width, WORK)
            tables.append(tape.new(self._setup.compute_bytes * width, "inputs"))
            tape.free(wide)
        tape.free(angles)
        if self._setup.attention != "flash":
            tables.append(tape.new(mask_bytes(self._shape, self._setup), "attention_mask"))
        return tables

    def _embedded(self) -> int:
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
        places = tape.new(8 * setup.tokens, WORK)
        embedded = tape.new(self._hidden, "hidden_states")
        tape.free(places, *whole)
        self._looked_up = [tape.hold(embedded)]  # an argument of the decoder, held by its caller
        return embedded

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

    def _embedding_backward(self, grad: int) -> None:
        """Of the family's embedding, then of the rows that it was given; lets go of `grad`."""
        tape, setup, h = self._tape, self._setup, self._shape.hidden_size
        rows = tape.new(self._hidden, "hidden_states")
        tape.free(grad)
        if setup.slices == 1:
            wide = tape.new(4 * setup.tokens * h, "hidden_states")
            tape.free(rows)
            table = tape.new(self._master, "module_gradients")
            tape.free(wide)
        else:
            table = tape.new(self._master, "module_gradients")
            for count in _chunks(setup.tokens, exchanged_rows(setup.slices)):
                elements = setup.slices * count * h
                sizes = (setup.compute_bytes * elements, 4 * elements, 4 * elements)
                travelling = [tape.new(size, "gathered_rows") for size in sizes]
                tape.free(*travelling)
            tape.free(rows)
        self._add_gradient("embedding", table)

    def _add_gradient(self, module: str, gradient: int) -> None:
        """Take a micro-batch's gradient of a module, or add it to the one of earlier
        micro-batches.
        """
        if module in self._module_gradients:
            self._tape.free(gradient)
        else:
            self._module_gradients[module] = gradient

    def _forward_layer(self, number: int, x: int, keep: Keeper) -> tuple[int, Backward]:
        """A layer's forward, which lets go of its input, and its backward; with recomputation it
        keeps the input alone.
        """
        layers, layer = self._layers, self._layer
        layers.before_forward(number)
        self._fetched.enter(number, following=number + 1)
        wants_x = number > 0 or self._setup.trains_embedding
        if isinstance(keep, Dropped) or not self._setup.recomputes(number):
            y, backward = layer.layer(x, keep, wants_x=wants_x)
            layers.after_forward(number)
            self._tape.free(x)
            return y, backward
        kept = keep.keep(x, "layer_inputs")
        y, _ = layer.layer(x, Dropped())
        layers.after_forward(number)
        self._tape.free(x)

        def backward_again(grad: int) -> int:
            layer.begin_recomputation()
            given = keep.take(kept)
            _, backward = layer.layer(given, Kept(self._tape), value=False, wants_x=wants_x)
            grad_x = backward(grad)
            self._tape.free(given)
            return grad_x

        return y, backward_again

    def _taken_gradients(self) -> list[int]:
        taken, self._layer.gradients = self._layer.gradients, []
        return taken

    def _loss(self, x: int, keep: Keeper) -> Backward:
        """The final norm and the loss with its gradient, in forward; lets go of `x`."""
        tape = self._tape
        hidden, norm_backward = self._layer.plain_norm(x, keep, width=self._shape.hidden_size)
        tape.free(x)
        chosen = tape.new(self._hidden, "hidden_states")
        grad_chosen = tape.new(self._hidden, "hidden_states")
        chunk = self._sliced_chunk if self._setup.slices > 1 else self._chunk
        trained = self._begin_head_gradient(keep)
        grads: list[int] = []  # of the chunk before, which is held until the next one's is there
        size = chunk_rows(self._setup.slices, vocab_size=self._shape.vocab_size)
        for rows in _chunks(self._setup.tokens, size):
            grads.append(chunk(rows))
            tape.free(*grads[:-1])
            del grads[:-1]
        tape.free(hidden, chosen, *grads, *self._looked_up, *trained[1:])
        self._looked_up = []

        def backward(_: int) -> int:
            if trained:
                self._add_gradient("head", trained[0])
            grad = tape.new(self._hidden, "hidden_states")
            tape.free(grad_chosen)
            return norm_backward(grad)

        if isinstance(keep, Dropped):
            tape.free(grad_chosen)
        return backward

    def _begin_head_gradient(self, keep: Keeper) -> list[int]:
        """`chunked_loss.TrainedHead`: the gradient, and the copy in the compute type; nothing of a
        frozen head, or where no gradient is made.
        """
        if not self._setup.trains_head or isinstance(keep, Dropped):
            return []
        c = self._setup.compute_bytes
        copy = [table_slice(self._shape, self._setup, width=c)] if c < 4 else []
        copies = [self._tape.new(size, "module_workspace") for size in copy]
        return [self._tape.new(self._master, "module_gradients"), *copies]

    def _chunk(self, rows: int) -> int:
        """`chunked_loss._chunk`: log-softmax and its gradient, in fp32; returns the gradient of the
        rows.
        """
        tape, c = self._tape, self._setup.compute_bytes
        wide, low = 4 * rows * self._shape.vocab_size, c * rows * self._shape.vocab_size
        product = tape.new(low, "logits")
        logits = tape.new(wide, "logits")
        kept = self._kept_product(product)
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
        tape.free(of_product, *kept)
        return grad

    def _kept_product(self, product: int) -> list[int]:
        """The head's product, which the gradient of a trained head is made from; of a frozen one it
        is let go.
        """
        if self._setup.trains_head:
            return [product]
        self._tape.free(product)
        return []

    def _add_piece(self) -> None:
        if self._setup.trains_head:
            self._tape.moment(gradient_piece(self._shape, self._setup), "module_workspace")

    def _sliced_chunk(self, rows: int) -> int:
        """`vocabulary_parallel._chunk`: the rows of all slices, and this slice's logits, which
        become probabilities in place.
        """
        tape, c, h = self._tape, self._setup.compute_bytes, self._shape.hidden_size
        everyone = rows * self._setup.slices
        columns = math.ceil(self._shape.vocab_size / self._setup.slices)
        states = tape.new(c * everyone * h, "gathered_rows")
        product = tape.new(c * everyone * columns, "logits")
        logits = tape.new(4 * everyone * columns, "logits")
        kept = self._kept_product(product)
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
        tape.free(states, logits, grad, *kept)
        return own


def _chunks(rows: int, size: int) -> list[int]:
    """Return the sizes of the pieces of `rows` rows."""
    return [min(size, rows - start) for start in range(0, rows, size)]
