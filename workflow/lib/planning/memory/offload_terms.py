"""The terms of the memory model that wait in host memory, and what of them is on the device:
activations, and packed weights of decoder layers.

Letters as in `terms`.
"""

from workflow.lib.model.architecture.layer_choice import activation_offload_layers
from workflow.lib.model.architecture.model_shape import DecoderLayer, ModelShape
from workflow.lib.planning.memory.terms import hosted_layers, kept_activations, packed_slice
from workflow.lib.step_plan.plan import StepPlan


def layers_of_stash(shape: ModelShape, setup: StepPlan) -> list[int]:
    """The layers whose activations wait in host memory."""
    return activation_offload_layers(
        setup.offload_activations,
        recomputation=setup.activation_checkpointing,
        num_layers=shape.num_layers,
    )


def stashed_counts(shape: ModelShape, setup: StepPlan) -> tuple[int, int]:
    """Of these layers those whose input alone is kept, because they are recomputed, and the
    others.
    """
    away = layers_of_stash(shape, setup)
    inputs = sum(map(setup.recomputes, away))
    return inputs, len(away) - inputs


def offload_window(shape: ModelShape, setup: StepPlan) -> int | None:
    """Bytes of offloaded activations that are on the device at a time, leaving or coming; None if
    none are offloaded.

    Two inputs of layers where all are recomputed, else what one layer keeps.
    """
    if not setup.offload_activations:
        return None
    if stashed_counts(shape, setup)[1] == 0:
        return 2 * setup.compute_bytes * setup.tokens * shape.hidden_size
    return shape.largest(lambda layer: kept_activations(layer, setup))


def offloaded_bytes(shape: ModelShape, setup: StepPlan) -> int:
    """Bytes that a process keeps in page-locked host memory, whose buffers PyTorch rounds up to a
    power of two.

    Rounded are the layers' inputs, which are equal in size; of the rest, of many sizes, a quarter
    is added.
    """
    if not setup.offload_activations:
        return 0
    away = layers_of_stash(shape, setup)
    whole = [layer for layer in away if not setup.recomputes(layer)]
    row = setup.compute_bytes * setup.tokens * shape.hidden_size
    inputs = (len(away) - len(whole)) * (1 << (row - 1).bit_length())
    return inputs + shape.total(lambda layer: kept_activations(layer, setup), whole) * 5 // 4


def gathered_weights(shape: ModelShape, setup: StepPlan) -> int:
    """Bytes of packed weights, at most: of the layer in use and the next one. One process has those
    alone that come from the host, both only if they are neighbours.
    """
    one = shape.largest(lambda layer: gathered_slices(layer, setup))
    if setup.processes > 1:
        return 2 * one
    neighbours = 2 * setup.offload_layers > shape.num_layers  # `layer_choice.spread`
    return one * (2 if neighbours else min(1, setup.offload_layers))


def weights_of_last_layer(shape: ModelShape, setup: StepPlan) -> int:
    """Bytes of packed weights that are gathered while the loss is computed: those of the model's
    last layer.
    """
    if setup.processes == 1 and 2 * setup.offload_layers < shape.num_layers:
        return 0  # the last one from the host is another, and freed before
    return gathered_slices(shape.layer(-1), setup)


def gathered_slices(layer: DecoderLayer, setup: StepPlan) -> int:
    """Bytes of the buffer that a layer's packed weights are gathered into; what one process with a
    whole copy has on its device is used where it is.
    """
    if setup.shards == 1 and not setup.offload_layers:
        return 0
    return packed_slice(layer, setup) * setup.shards


def hosted_bytes(shape: ModelShape, setup: StepPlan) -> int:
    """Bytes of packed weights that a process keeps in page-locked host memory, a buffer of a power
    of two per layer.
    """

    def buffer(layer: DecoderLayer) -> int:
        return 1 << (packed_slice(layer, setup) - 1).bit_length()

    return shape.total(buffer, hosted_layers(shape, setup))
