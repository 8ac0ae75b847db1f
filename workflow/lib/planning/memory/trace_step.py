"""What a run asks of the allocator from the loaded model to the end of its second step, in order.

The second step is the first that begins as all others do, with what the allocator has kept. Before
them lie the start-up checks, whose freed memory it keeps too, and the moments of AdamW. Every row
is taken as full and every token as trained.
"""

from dataclasses import replace

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.memory.allocation_tape import (
    NotSaved,
    OffloadedActivations,
    SavedOnDevice,
    SavedTensors,
    Tape,
)
from workflow.lib.planning.memory.layer_tensors import sharded_bytes
from workflow.lib.planning.memory.offload_terms import layers_of_stash, offload_window
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import (
    CODE_TABLES,
    frozen_tables,
    hosted_layers,
    layer_moments,
    layer_tensors,
    mask_bytes,
    module_moments,
    product_scales,
    table_slice,
)
from workflow.lib.planning.memory.trace_layer import LayerTrace
from workflow.lib.planning.memory.trace_norms import WORK, Backward
from workflow.lib.planning.memory.trace_sharding import PACKED, FetchedLayers, ShardedLayers
from workflow.lib.planning.memory.trace_tables import EmbeddingTrace, LossTrace, ModuleGradients

STEPS = 2
LOAD, CHECKS = "load", "check"  # before training


def step_trace(shape: ModelShape, setup: Setup, *, checked: bool = True) -> Tape:
    """Return the events of a process that trains a model; checked: after the start-up checks."""
    tape = Tape()
    units = _Units(tape, shape, setup)
    _load(tape, shape, setup)
    if checked:
        _check(tape, shape, setup, units)
    _make_optimizer(tape, shape, setup)
    batches = _MicroBatches(tape, shape, setup, units)
    for _ in range(STEPS):
        batches.begin_step()
        for _ in range(2 if setup.accumulates else 1):
            batches.train()
        batches.optimizer_step()
    return tape


def _load(tape: Tape, shape: ModelShape, setup: Setup) -> None:
    """Parameters and buffers, as `materialize_` makes them."""
    tape.phase(LOAD)
    for _ in range(frozen_tables(shape, setup)):
        tape.new(table_slice(shape, setup, width=setup.compute_bytes), "embedding_and_head")
    for _ in range(setup.trained_tables):
        tape.new(table_slice(shape, setup, width=4), "module_weights")
    on_host = set(hosted_layers(shape, setup))
    for number in range(shape.num_layers):
        layer = shape.layer(number)
        for term, tensors in layer_tensors(layer, setup).by_term.items():
            for tensor in tensors if not (number in on_host and term in PACKED) else ():
                tape.new(sharded_bytes([tensor], processes=setup.shards), term)
        for size in CODE_TABLES * len(layer.linears):
            tape.new(size, "nf4_tables")
    tape.new(product_scales(shape, setup), "nf4_tables")


def _check(tape: Tape, shape: ModelShape, setup: Setup, units: "_Units") -> None:
    """`startup_checks.startup_checks`: a forward of one row without gradients, and every layer
    gathered and compared.
    """
    tape.phase(CHECKS)
    _MicroBatches(tape, shape, replace(setup, micro_batch_size=1), units).measure()
    for number in range(shape.num_layers):
        units.layers.check(number)


def _make_optimizer(tape: Tape, shape: ModelShape, setup: Setup) -> None:
    """AdamW makes its moments at once."""
    tape.phase(LOAD)
    of_kinds = [layer_moments(kind, setup) for kind in shape.kinds]
    of_layers = [moment for kind in shape.order for moment in of_kinds[kind]]
    for num_bytes, leaves in [*of_layers, *module_moments(shape, setup)] * 2:
        if not leaves:
            tape.new(num_bytes, "adam_moments")


class _Units:
    """What a process has of a model whatever the micro-batch: sharded layers, those that come from
    the host, and the workspaces of cuBLAS.
    """

    def __init__(self, tape: Tape, shape: ModelShape, setup: Setup) -> None:
        self._tape = tape
        self._workspace = setup.fixed.get("cublas_workspace", 0) // 2
        self._workspaces = 0
        self.layers = ShardedLayers(tape, shape, setup)
        self.fetched = FetchedLayers(tape, shape, setup)

    def start_products(self) -> None:
        """cuBLAS takes a workspace for each thread that multiplies: that of forward, and
        autograd's.
        """
        if self._workspaces < 2:
            self._tape.new(self._workspace, "cublas_workspace")
            self._workspaces += 1


class _MicroBatches:
    """Micro-batches of one size, one after the other, through the model of a process."""

    def __init__(self, tape: Tape, shape: ModelShape, setup: Setup, units: _Units) -> None:
        self._tape, self._shape, self._setup, self._units = tape, shape, setup, units
        self._kinds = [LayerTrace(tape, x, setup, tokens=setup.tokens) for x in shape.kinds]
        self._module_gradients = ModuleGradients(tape)
        self._embedding = EmbeddingTrace(tape, shape, setup, self._module_gradients)
        self._loss = LossTrace(tape, shape, setup, self._kinds[0], self._module_gradients)
        self._hidden = setup.compute_bytes * setup.tokens * shape.hidden_size
        self._inputs: list[int] = []

    def measure(self) -> None:
        """Forward alone, without gradients."""
        self._units.start_products()
        inputs = self._make_inputs()
        x = self._embedding.forward()
        tables = self._rotary_tables()
        for number in range(self._shape.num_layers):
            x, _ = self._forward_layer(number, x, NotSaved())
        self._loss.forward(x, NotSaved(), self._embedding)
        self._units.layers.end_forward()
        self._tape.free(*tables, *inputs)

    def begin_step(self) -> None:
        """Adapters are fixed from now on."""
        for kind in self._kinds:
            kind.begin_step()

    def train(self) -> None:
        """Forward and backward."""
        tape = self._tape
        inputs = self._make_inputs()
        tape.free(*self._inputs)  # the batch before is held until this one is there
        self._inputs = inputs
        tape.phase("look_up_embedding")
        saved = self._saved_tensors()
        self._units.start_products()
        x = self._embedding.forward()
        tables = self._rotary_tables()
        backwards, loss_backward = self._forward(x, saved)
        grad = self._backward(backwards, loss_backward, saved)
        if self._setup.trains_embedding:
            self._embedding.backward(grad)
        elif grad >= 0:
            tape.free(grad)
        tape.free(*tables)

    def _forward(self, x: int, saved: SavedTensors) -> tuple[list[Backward], Backward]:
        """The layers and the loss; returns the backwards of both."""
        tape, here = self._tape, SavedOnDevice(self._tape)
        away = layers_of_stash(self._shape, self._setup)
        tape.phase("forward")
        backwards = []
        for number in range(self._shape.num_layers):
            x, backward = self._forward_layer(number, x, saved if number in away else here)
            backwards.append(backward)
        tape.phase("loss")
        of_loss = saved if self._setup.offload_activations is True else here
        loss_backward = self._loss.forward(x, of_loss, self._embedding)
        self._units.layers.end_forward()
        return backwards, loss_backward

    def _backward(
        self, backwards: list[Backward], loss_backward: Backward, saved: SavedTensors
    ) -> int:
        """Loss and layers; returns the gradient of the embedding's rows, or -1."""
        tape, layers, num_layers = self._tape, self._units.layers, self._shape.num_layers
        tape.phase("backward")
        self._units.start_products()
        layers.gather_ahead(num_layers - 1)
        # Three measurements of GPUs, two of them of 80 layers, have one tensor more of this size,
        # to 0.6 MiB; what holds it is not known.
        stashed = isinstance(saved, OffloadedActivations)
        unexplained = [tape.new(self._hidden, "offloaded_activations")] if stashed else []
        grad = loss_backward(-1)
        for number in reversed(range(num_layers)):
            self._units.fetched.enter(number, following=number - 1)
            self._layer(number).layer_number = number
            layers.before_backward(number)
            grad = backwards[number](grad)
            layers.after_backward(number, self._layer(number).pop_gradients())
        layers.end_backward()
        tape.free(*unexplained)
        return grad

    def optimizer_step(self) -> None:
        """Gradients and the batch are freed."""
        for kind in self._kinds:
            kind.end_step()
        self._tape.phase("optimizer_step")
        self._units.layers.drop_gradients()
        self._tape.free(*self._inputs)
        self._module_gradients.drop()
        self._inputs = []

    def _saved_tensors(self) -> SavedTensors:
        window = offload_window(self._shape, self._setup)
        if window is None:
            return SavedOnDevice(self._tape)
        return OffloadedActivations(self._tape, window_bytes=window)

    def _make_inputs(self) -> list[int]:
        """Ids, positions, row indices, targets, and embedding rows from host memory."""
        sizes = [8 * self._setup.tokens] * 4 + [self._hidden] * self._setup.offload_embedding
        return [self._tape.new(size, "inputs") for size in sizes]

    def _rotary_tables(self) -> list[int]:
        """Cosine and sine, and for `sdpa`, `eager` and `flex` the masks of packed rows."""
        head_dim = self._shape.largest(lambda layer: layer.head_dim)
        tape, width = self._tape, self._setup.tokens * head_dim
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

    def _layer(self, number: int) -> LayerTrace:
        return self._kinds[self._shape.order[number]]

    def _forward_layer(self, number: int, x: int, saved: SavedTensors) -> tuple[int, Backward]:
        """A layer's forward, which frees its input, and its backward; with recomputation it
        keeps the input alone.
        """
        layers, layer = self._units.layers, self._layer(number)
        layer.layer_number = number
        layers.before_forward(number)
        self._units.fetched.enter(number, following=number + 1)
        wants_x = number > 0 or self._setup.trains_embedding
        if isinstance(saved, NotSaved) or not self._setup.recomputes(number):
            y, backward = layer.layer(x, saved, wants_x=wants_x)
            layers.after_forward(number)
            self._tape.free(x)
            return y, backward
        handle = saved.pack(x, "layer_inputs")
        y, _ = layer.layer(x, NotSaved())
        layers.after_forward(number)
        self._tape.free(x)

        def backward_again(grad: int) -> int:
            layer.begin_recomputation()
            layer_input = saved.unpack(handle)
            _, backward = layer.layer(
                layer_input, SavedOnDevice(self._tape), value=False, wants_x=wants_x
            )
            grad_x = backward(grad)
            self._tape.free(layer_input)
            return grad_x

        return y, backward_again
