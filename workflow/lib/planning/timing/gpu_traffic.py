"""Seconds that traffic between GPUs takes, by how they are connected.

A micro-batch gathers packed weights for forward and, if freed, for backward, sends hidden states to
the head's slices and gradients back, and reduces adapters' gradients, with replicas (HSDP) twice.
Collectives are rings: a GPU receives all but its own part, a node by its network."""

import math
from dataclasses import dataclass

from workflow.lib.model.architecture.model_shape import DecoderLayer, ModelShape
from workflow.lib.planning.model_sizes import layer_parameters, packed_bytes
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.gpu_models import GpuModel

LOCAL_HOP_S = 2e-6  # a ring's step to the next GPU of a node, and of another node; assumed
REMOTE_HOP_S = 10e-6
NETWORK_PER_GPU = 50e9  # one 400 Gb/s port for each GPU; assumed where a run takes several nodes


@dataclass(frozen=True)
class Fabric:
    """How GPUs are connected: bytes/s in one direction, of a GPU inside and of a node outside."""

    name: str
    gpus_per_node: int
    local: float
    network: float
    attained: float = 0.8  # share of these figures that a large collective reaches; assumed


@dataclass(frozen=True)
class Traffic:
    """Seconds of a micro-batch's collectives, and the bytes of weights that they bring."""

    beside_s: float  # may run beside compute (FSDP2 prefetches the next layer)
    exposed_s: float
    """Has nothing to hide behind: the first gathering, and the vocabulary's exchange."""
    gathered_bytes: float
    gather_s: float = 0.0  # of one layer
    gpus_of_host: int = 1
    """Of the same run: what they keep in host memory goes through one host's memory."""


NO_TRAFFIC = Traffic(0.0, 0.0, 0.0)


def fabric_of(gpu: GpuModel, *, gpus_per_node: int) -> Fabric:
    """Return how such GPUs are usually connected: by own links, or by PCIe through the host."""
    network = NETWORK_PER_GPU * gpus_per_node
    return Fabric(gpu.link.name, gpus_per_node, gpu.link.bandwidth, network, gpu.link.share)


def ring_seconds(num_bytes: float, fabric: Fabric, *, processes: int, stride: int = 1) -> float:
    """Seconds to gather (or reduce and scatter) `num_bytes` over `processes` GPUs, `stride` apart:
    1 = neighbours, node after node; a group's size = one GPU of each group."""
    if processes == 1:
        return 0.0
    local = max(1, min(processes, fabric.gpus_per_node // stride))
    nodes = math.ceil(processes / local)
    # rings at once through a node's network
    sharing = fabric.gpus_per_node // local if nodes > 1 else 1
    inside = num_bytes * (processes - 1) / processes / fabric.local if local > 1 else 0.0
    between = num_bytes * sharing * (nodes - 1) / nodes / fabric.network
    hops = (processes - nodes) * LOCAL_HOP_S + (nodes if nodes > 1 else 0) * REMOTE_HOP_S
    return max(inside, between) / fabric.attained + hops


def micro_batch_traffic(shape: ModelShape, setup: StepPlan, fabric: Fabric) -> Traffic:
    """Return what a micro-batch's collectives take; nothing for one process."""
    if setup.processes == 1:
        return NO_TRAFFIC
    unit = shape.total(lambda layer: _gathered(layer, setup)) / shape.num_layers
    gather = ring_seconds(unit, fabric, processes=setup.shards)
    gathers = shape.num_layers * setup.gathers
    vocabulary = _vocabulary_seconds(shape, setup, fabric)
    reductions = sum(
        count * _reduction_seconds(4 * layer_parameters(shape.kinds[kind], setup), setup, fabric)
        for kind, count in shape.counts.items()
    )
    return Traffic(
        beside_s=gathers * gather + reductions + vocabulary,
        exposed_s=vocabulary + gather,
        gathered_bytes=gathers * unit,
        gather_s=gather,
        gpus_of_host=min(setup.processes, fabric.gpus_per_node),
    )


def _gathered(layer: DecoderLayer, setup: StepPlan) -> int:
    """Bytes of one layer, gathered: packed weights, adapters (DoRA's in fp32), norms and biases."""
    if setup.shards == 1:
        return 0
    others = sum(length for _, length in layer.vectors)
    others += sum(math.prod(size) for _, size in layer.tensors)
    width = 4 if setup.dora else setup.compute_bytes
    trained = layer_parameters(layer, setup)
    return packed_bytes(layer.linears, setup) + width * trained + setup.compute_bytes * others


def _reduction_seconds(num_bytes: int, setup: StepPlan, fabric: Fabric) -> float:
    """Of a layer's adapter gradients: reduced over the shards, summed over replicas."""
    shards = setup.shards
    across = ring_seconds(
        num_bytes / shards,
        fabric,
        processes=setup.replicas,
        stride=min(shards, fabric.gpus_per_node),
    )
    return ring_seconds(num_bytes, fabric, processes=shards) + 2 * across


def _vocabulary_seconds(shape: ModelShape, setup: StepPlan, fabric: Fabric) -> float:
    """To the head's slices, and back as fp32 gradients; rows of a sliced embedding too."""
    rows = setup.slices * setup.tokens * shape.hidden_size
    travels = [setup.compute_bytes, 4] + ([] if setup.rows_from_host else [setup.compute_bytes])
    return sum(ring_seconds(rows * n, fabric, processes=setup.slices) for n in travels)
