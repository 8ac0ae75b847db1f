"""Memory that a process may take of its GPU and of the host, and its use of the host."""

from dataclasses import dataclass

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory.peaks import Peaks
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import setting_error
from workflow.lib.system.units import GIB

# Resident set of a process with a GPU besides the model, measured (docs/memory-model.md): 2.2 GiB,
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
    """Return the host memory of a node's processes at the predicted peaks. With GPUs: each process,
    its page-locked memory, and the largest tensor's slices while loading; later an embedding's
    pages, once, and rows in transfer."""
    if machine.device == "cpu":
        return machine.processes_per_node * peaks.allocated_bytes
    table = shape.vocab_size * shape.hidden_size * shape.source_bytes
    stack = shape.largest(lambda layer: max(x.num_weights for x in layer.linears) // 2)  # 4 bits
    rows = plan.rows_from_host * shape.hidden_size * plan.compute_bytes
    each = GPU_PROCESS_BYTES + peaks.host_bytes + rows
    return machine.processes_per_node * each + max(table, stack)
