"""Memory that a process may take of its GPU and of the host, and its use of the host."""

from collections.abc import Sequence
from dataclasses import dataclass

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.planning.memory.replay import page_locked
from workflow.lib.planning.model_sizes import layer_bytes, trainable_parameters
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.settings.optimizer_kinds import OPTIMIZERS
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import setting_error
from workflow.lib.system.units import GIB

# Resident set of a process with a GPU besides the model, measured (docs/predictions.md): 2.2 GiB,
# CUDA's libraries and NCCL included.
GPU_PROCESS_BYTES = int(2.5 * GIB)
# Outside of the allocator: CUDA context and loaded kernels; with several processes NCCL too.
# Measured with the engine on 2 x H200, torch 2.11: 0.755 and 1.577 GiB. Smaller GPUs have smaller
# contexts.
CONTEXT_BYTES = int(0.76 * GIB)
CONTEXT_AND_NCCL_BYTES = int(1.58 * GIB)
# Allocator's reserve beyond the allocated peak: runs of the engine under a falling memory cap, 1
# and 2 H200, torch 2.11. With expandable_segments:True, which `launch` sets, 2.5% was enough for
# all; with native segments 10% was, and with 6% two processes failed.
ALLOCATOR_SLACK = 0.03


@dataclass(frozen=True)
class Budget:
    """Memory that a process may take, bytes. On the CPU, its share of the host."""

    capacity_bytes: int
    outside_allocator_bytes: int
    margin_bytes: int
    host_capacity_bytes: int | None

    def slack_bytes(self, peak_bytes: int) -> int:
        """The allocator's reserve beyond the allocated peak."""
        return int(peak_bytes * ALLOCATOR_SLACK)

    def needed_bytes(self, peak_bytes: int) -> int:
        """All bytes that must fit into the capacity for a predicted peak."""
        outside = self.outside_allocator_bytes + self.margin_bytes
        return peak_bytes + self.slack_bytes(peak_bytes) + outside

    def holds(self, peak_bytes: int) -> bool:
        """Whether a predicted peak fits."""
        return self.needed_bytes(peak_bytes) <= self.capacity_bytes


def budget(hardware: HardwareConfig, machine: Machine) -> Budget:
    """Return a process's budget, or raise `UserError` for more than the GPUs have."""
    host = machine.host_bytes
    if hardware.host_memory_gib != "auto":
        allowed = int(hardware.host_memory_gib * GIB)
        host = allowed if host is None else min(host, allowed)
    if machine.gpu_bytes is None:
        assert host is not None, "a machine without GPUs has memory of its own"
        return Budget(host // machine.processes_per_node, 0, 0, host)
    capacity = machine.gpu_bytes
    if hardware.gpu_memory_gib != "auto":
        capacity = int(hardware.gpu_memory_gib * GIB)
        if capacity > machine.gpu_bytes:
            raise setting_error(
                "hardware.gpu_memory_gib",
                hardware.gpu_memory_gib,
                f"the smallest GPU has {machine.gpu_bytes / GIB:.2f} GiB",
                "Set it to that or below, or to auto",
            )
    outside = CONTEXT_BYTES if machine.processes == 1 else CONTEXT_AND_NCCL_BYTES
    return Budget(capacity, outside, int(hardware.memory_margin_gib * GIB), host)


def host_bytes(shape: ModelShape, plan: StepPlan, machine: Machine, peaks: Peaks) -> int:
    """Return the host memory of a node's processes at the predicted peaks, with the start values of
    a reference. With GPUs: each process, its page-locked memory, and the largest tensor's slices
    while loading; later an embedding's pages, once, and rows in transfer."""
    start = plan.start_reference * 4 * trainable_parameters(shape, plan) // plan.shards
    if machine.device == "cpu":
        return machine.processes_per_node * (peaks.allocated_bytes + start)
    table = shape.vocab_size * shape.hidden_size * shape.source_bytes
    stack = shape.largest(lambda layer: max(x.num_weights for x in layer.linears))
    stack = stack * plan.compute_bytes if plan.kept else stack // 2  # 4 bits
    rows = plan.rows_from_host * shape.hidden_size * plan.compute_bytes
    each = GPU_PROCESS_BYTES + peaks.host_bytes + rows + start
    return machine.processes_per_node * each + max(table, stack)


def certain_lack(shape: ModelShape, plan: StepPlan, machine: Machine, limits: Budget) -> str | None:
    """Return why no values of the memory options can make a plan fit; None if some might. Counts
    only what every plan holds."""
    if machine.device == "cpu":
        return None
    resident = resident_bytes(shape, plan)
    free = limits.capacity_bytes - limits.outside_allocator_bytes - limits.margin_bytes - resident
    if free < 0:
        least_gib = (limits.capacity_bytes - free) / GIB
        return f"trained weights, embedding and head need over {least_gib:.2f} GiB of each GPU"
    slices = [num_bytes // plan.shards for num_bytes in layer_bytes(shape, plan)]
    locked = _least_locked(slices, offloaded=sum(slices) - free)
    needed = host_bytes(shape, plan, machine, Peaks({}, host_bytes=locked))
    capacity_bytes = limits.host_capacity_bytes
    if capacity_bytes is None or needed <= capacity_bytes:
        return None
    return (
        f"each GPU holds {free / GIB:.2f} of {sum(slices) / GIB:.2f} GiB of packed weights; with "
        f"the rest in host memory a node needs {needed / GIB:.2f} GiB and has "
        f"{capacity_bytes / GIB:.2f}"
    )


def _least_locked(slices: Sequence[int], *, offloaded: int) -> int:
    """Return the least page-locked memory for so many bytes of layers' packed weights."""
    locked = 0.0
    for size in sorted(filter(None, slices), key=lambda size: page_locked(size) / size):
        taken = max(0, min(size, offloaded))
        locked += taken * page_locked(size) / size
        offloaded -= taken
    return int(locked)


def resident_bytes(shape: ModelShape, plan: StepPlan) -> int:
    """Return the bytes that no memory option moves from a GPU at the end of backward: fp32 masters,
    their gradients and moments, and embedding and head in the compute dtype."""
    trained = trainable_parameters(shape, plan)
    states = 2 * 4 * trained + OPTIMIZERS[plan.optimizer].moment_bytes(trained)
    head = not (plan.trains_head or (shape.tied_embeddings and plan.trains_embedding))
    embedding = not (shape.tied_embeddings or plan.trains_embedding or plan.offload_embedding)
    table = shape.vocab_size * shape.hidden_size * plan.compute_bytes
    return states // plan.shards + (head + embedding) * table // plan.slices
