"""Seconds of traffic between GPUs, by their links.

Collectives are rings: a GPU receives all but its own part, a node by its network."""

import math
from dataclasses import dataclass

from workflow.lib.system.gpu_models import GpuModel

LOCAL_HOP_S = 2e-6  # a ring's hop within a node, and between nodes; assumed
REMOTE_HOP_S = 10e-6
NETWORK_PER_GPU = 50e9  # one 400 Gb/s port for each GPU; assumed where a run takes several nodes


@dataclass(frozen=True)
class Fabric:
    """Links of GPUs: bytes/s in one direction, of a GPU within a node and of a node outside."""

    name: str
    gpus_per_node: int
    local: float
    network: float
    attained: float = 0.8  # share of these figures that a large collective reaches; assumed


def fabric_of(gpu: GpuModel, *, gpus_per_node: int) -> Fabric:
    """Return the usual links of such GPUs: their own, or PCIe through the host."""
    network = NETWORK_PER_GPU * gpus_per_node
    return Fabric(gpu.link.name, gpus_per_node, gpu.link.bandwidth, network, gpu.link.share)


def ring_seconds(num_bytes: float, fabric: Fabric, *, processes: int, stride: int = 1) -> float:
    """Seconds to gather (or reduce and scatter) `num_bytes` over `processes` GPUs, `stride` apart:
    1 = neighbours, node after node; a group's size = one GPU of each group."""
    if processes == 1:
        return 0.0
    local = max(1, min(processes, fabric.gpus_per_node // stride))
    nodes = math.ceil(processes / local)
    # rings that share a node's network
    sharing = fabric.gpus_per_node // local if nodes > 1 else 1
    inside = num_bytes * (processes - 1) / processes / fabric.local if local > 1 else 0.0
    between = num_bytes * sharing * (nodes - 1) / nodes / fabric.network
    hops = (processes - nodes) * LOCAL_HOP_S + (nodes if nodes > 1 else 0) * REMOTE_HOP_S
    return max(inside, between) / fabric.attained + hops
