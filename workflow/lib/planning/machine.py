"""The machine that a plan is made for: the one at hand, or one that the settings name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from workflow.lib.planning.probes import Probe
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.system.environment import shipped_path
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.gpu_models import GpuModel, parse_gpu
from workflow.lib.system.hardware import visible_gpus
from workflow.lib.system.units import GIB


@dataclass(frozen=True)
class Machine:
    """A run's hardware: `cuda` or `cpu`, processes, their GPUs, and free host memory in bytes."""

    device: str
    processes: int
    gpu_names: tuple[str, ...]
    gpu_bytes: int | None  # memory of the smallest GPU; None on the CPU
    host_bytes: int | None  # None if unknown: on an imagined GPU machine
    flash_attention: bool = False  # whether the package flash-attn is known to be installed
    bfloat16: bool = True
    """Whether its GPUs (capability 8.0), or its CPU without any, multiply bfloat16."""
    float8: bool = True  # whether its GPUs multiply float8
    imagined_host: str | None = None
    """Source of an imagined machine's host memory."""
    nodes: int = 1  # machines like this one, which share the processes equally
    probes: Mapping[str, Probe] = field(default_factory=dict)
    """Probes by device."""
    cpu: str = ""  # the name in probes (`probes.cpu_name`)

    @property
    def processes_per_node(self) -> int:
        """Processes that share this machine's memory."""
        return self.processes // self.nodes


def imagined_machine(
    count: int, gpu: GpuModel, *, nodes: int = 1, host_bytes: int | None = None
) -> Machine:
    """Return `nodes` machines with `count` such GPUs each and nothing else on them."""
    return Machine(
        device="cuda",
        processes=count * nodes,
        nodes=nodes,
        gpu_names=(gpu.name,) * count * nodes,
        gpu_bytes=int(gpu.memory_gib * GIB),
        host_bytes=host_bytes,
        float8=gpu.float8,
    )


def asked_machine(device: str, count: int, nodes: int) -> Machine:
    """Return machines with the requested hardware, whatever their GPUs and memory."""
    return Machine(
        device=device,
        processes=count * nodes,
        nodes=nodes,
        gpu_names=(),
        gpu_bytes=None,
        host_bytes=None,
    )


def requested_processes(hardware: HardwareConfig) -> tuple[str, int]:
    """Return the requested device type (`cuda` or `cpu`) and number of processes of a node, without
    a check that they exist; `auto` means the visible GPUs."""
    count = len(visible_gpus()) if hardware.gpus == "auto" else hardware.gpus
    return ("cuda", count) if count else ("cpu", hardware.cpu_processes)


def check_place(name: str, hardware: HardwareConfig, *, in_job: bool, elsewhere: bool) -> None:
    """Raise `UserError` for settings that do not suit this machine, or the jobs' cluster."""
    if in_job and hardware.nodes > 1:
        raise UserError(
            f"hardware.nodes = {hardware.nodes} (run {name}): this machine is one node. "
            f"Run with --profile {shipped_path('workflow/profiles/slurm')}, or set it to 1."
        )
    if elsewhere and hardware.gpus == "auto":
        raise UserError(
            f"hardware.gpus = 'auto' (run {name}): the GPUs of a cluster are not seen from here. "
            "Set it to the number that a run takes on each node; 0 trains on CPUs."
        )


def imagined_model(hardware: HardwareConfig) -> GpuModel | None:
    """Return the kind of GPU in `gpu_model`, if GPUs are wanted and none is visible."""
    device, _ = requested_processes(hardware)
    if hardware.gpu_model is None or device == "cpu" or visible_gpus():
        return None
    return parse_gpu(hardware.gpu_model, setting="hardware.gpu_model")


def num_processes(hardware: HardwareConfig) -> tuple[str, int]:
    """Return `requested_processes`; raises `UserError` if that exceeds the visible GPUs."""
    device, count = requested_processes(hardware)
    available = len(visible_gpus())
    if device == "cuda" and count > available and imagined_model(hardware) is None:
        raise setting_error(
            "hardware.gpus",
            count,
            f"this machine shows {available} GPU(s)",
            "Set it to that number or below, or to auto; 0 trains on the CPU. To plan for a "
            "cluster's GPUs, name them in hardware.gpu_model",
        )
    return device, count
