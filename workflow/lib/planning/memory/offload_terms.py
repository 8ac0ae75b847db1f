"""The terms of the memory model that wait in host memory, and what of them is on the device:
activations, and packed weights of decoder layers.

Letters as in `terms`.
"""

import math

from workflow.lib.model.architecture.layer_choice import activation_offload_layers
from workflow.lib.model.architecture.model_shape import DecoderLayer, ModelShape
from workflow.lib.planning.memory.layer_tensors import rounded, sharded_bytes
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.memory.terms import hosted_layers, kept_activations, layer_tensors


def layers_of_stash(shape: ModelShape, setup: Setup) -> list[int]:
    """The layers whose activations wait in host memory."""
    return activation_offload_layers(
        setup.offload_activations,
        recomputation=setup.activation_checkpointing,
        num_layers=shape.num_layers,
    )


def stashed_counts(shape: ModelShape, setup: Setup) -> tuple[int, int]:
    """Of these layers those whose input alone is kept, because they are recomputed, and the
    others.
    """
    away = layers_of_stash(shape, setup)
    inputs = setup.recomputed_among(away)
    return inputs, len(away) - inputs


def offload_window(shape: ModelShape, setup: Setup) -> int | None:
    """Bytes of offloaded activations that are on the device at a time, leaving or coming; None if
    none are offloaded.

    Two inputs of layers where all are recomputed, else what one layer keeps.
    """
    if not setup.offload_activations:
        return None
    if stashed_counts(shape, setup)[1] == 0:
        return 2 * setup.compute_bytes * setup.tokens * shape.hidden_size
    return shape.largest(lambda layer: kept_activations(layer, setup))


def offloaded_bytes(shape: ModelShape, setup: Setup) -> int:
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


def hosted_slice(layer: DecoderLayer, setup: Setup) -> int:
    """Bytes of a layer's packed weights and scales that a process keeps in host memory
    (`layer_offload._OffloadedLayer`).
    """
    tensors = layer_tensors(layer, setup).by_term
    parts = tensors["nf4_weights"] + tensors["nf4_scales"]
    return rounded(math.ceil(sharded_bytes(parts, processes=1) / setup.shards))


def fetched_layers(shape: ModelShape, setup: Setup) -> int:
    """Bytes on the device of layers from the host, at most: the one in use or the next, both if
    they are neighbours.

    Of several processes' layers both count only where all are on the host: else another layer is
    gathered at that time, which is more. With several processes also this one's slice on its way.
    """
    if setup.offload_layers == 0:
        return 0
    own = _largest_slice(shape, setup)
    neighbours = 2 * setup.offload_layers > shape.num_layers  # `layer_choice.spread`
    both = neighbours and (setup.shards == 1 or setup.offload_layers == shape.num_layers)
    return own * setup.shards * (2 if both else 1) + (own if setup.shards > 1 else 0)


def last_hosted_layer(shape: ModelShape, setup: Setup) -> int:
    """Bytes on the device, while the loss is computed, of the model's last layer if it comes from
    the host.
    """
    if 2 * setup.offload_layers < shape.num_layers:
        return 0  # the last one that does is another, and freed before
    return hosted_slice(shape.layer(-1), setup) * setup.shards


def hosted_bytes(shape: ModelShape, setup: Setup) -> int:
    """Bytes of packed weights that a process keeps in page-locked host memory, a buffer of a power
    of two per layer.
    """

    def buffer(layer: DecoderLayer) -> int:
        return 1 << (hosted_slice(layer, setup) - 1).bit_length()

    return shape.total(buffer, hosted_layers(shape, setup))


def _largest_slice(shape: ModelShape, setup: Setup) -> int:
    return shape.largest(lambda layer: hosted_slice(layer, setup))
