"""What to change when a run does not fit: single changes of a setting, each predicted like the run
itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.memory.closed_form import predict
from workflow.lib.planning.memory.setup import Setup
from workflow.lib.planning.preflight.budget import budget, host_bytes
from workflow.lib.planning.preflight.planning_inputs import divisors
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.system.units import GIB

MOST_GPUS = 64
SHORTEST_ROW = 128  # tokens; shorter rows are no remedy worth naming
SMALLEST_RANK = 4
# From the nearest to the farthest: first what leaves the result of training as it is, then what
# only rounds otherwise.
NEAREST = (
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "hardware.reshard_after_forward",
    "hardware.offload_embedding",
    "hardware.offload_activations",
    "hardware.offload_layers",
    "hardware.shard_size",
    "hardware.gpus",
    "hardware.cpu_processes",
    "train.fused_layers",
    "train.fused_loss",
    "train.optimizer",
    "quantize.double_quant",
    "lora.dropout",
    "lora.r",
    "data.seq_len",
    "lora.use_dora",
    "lora.modules_to_save",
)


@dataclass(frozen=True)
class Remedy:
    """One change, the peak and the capacity that a process then has, and whether it fits."""

    change: str
    peak_bytes: int
    fits: bool

    def __str__(self) -> str:
        return f"{self.change} (peak {self.peak_bytes / GIB:.2f} GiB)"


def remedies(
    shape: ModelShape,
    setup: Setup,
    machine: Machine,
    hardware: HardwareConfig,
    *,
    global_batch_size: int,
) -> list[Remedy]:
    """Return the single changes that help; of each kind the smallest that fits, else the largest.

    First come those that fit, the nearest (`NEAREST`) before others; then those that do not, the
    largest saving first.

    Micro-batches other than the given one are predicted with one row.
    """
    best = []
    for options in _options(shape, setup, machine, global_batch_size=global_batch_size):
        tried = [_try(shape, change, changed, machine, hardware) for change, changed in options]
        if tried:
            best.append(next((remedy for remedy in tried if remedy.fits), tried[-1]))
    before = predict(shape, setup).peak_bytes
    helpful = [remedy for remedy in best if remedy.fits or remedy.peak_bytes < before]
    return sorted(helpful, key=_order)


def _order(remedy: Remedy) -> tuple[bool, int]:
    setting = remedy.change.split(" = ")[0]
    assert setting in NEAREST, f"{setting} has no place among the remedies"
    return not remedy.fits, NEAREST.index(setting) if remedy.fits else remedy.peak_bytes


def _try(
    shape: ModelShape, change: str, setup: Setup, machine: Machine, hardware: HardwareConfig
) -> Remedy:
    changed = replace(machine, processes=setup.processes)
    limits = budget(hardware, changed)
    peak = predict(shape, setup).peak_bytes
    host = host_bytes(shape, setup, changed, peak_bytes=peak)
    room = limits.host_capacity_bytes is None or host <= limits.host_capacity_bytes
    return Remedy(change, peak, limits.holds(peak) and room)


Option = tuple[str, Setup]


def _options(
    shape: ModelShape, setup: Setup, machine: Machine, *, global_batch_size: int
) -> Iterator[list[Option]]:
    """Yield the changes of one setting at a time, from the smallest to the largest."""
    rows = global_batch_size // setup.processes
    smaller = [d for d in reversed(divisors(rows)) if d < setup.micro_batch_size]
    yield [(f"train.micro_batch_size = {d}", replace(setup, micro_batch_size=d)) for d in smaller]
    yield from ([option] for option in _switches(setup, machine, tied=shape.tied_embeddings))
    if machine.device == "cuda":
        yield [
            (f"hardware.offload_layers = {count}", replace(setup, offload_layers=count))
            for count in range(setup.offload_layers + 1, shape.num_layers + 1)
        ]
    lengths = _halves(setup.seq_len, SHORTEST_ROW)
    yield [(f"data.seq_len = {n} (tokenizes again)", replace(setup, seq_len=n)) for n in lengths]
    yield [
        (f"{_process_setting(machine)} = {p // machine.nodes}", replace(setup, processes=p))
        for p in _process_counts(machine, global_batch_size)
        if p % setup.replicas == 0
    ]
    yield [(f"lora.r = {r}", replace(setup, rank=r)) for r in _halves(setup.rank, SMALLEST_RANK)]


def _switches(setup: Setup, machine: Machine, *, tied: bool) -> Iterator[Option]:
    if setup.trained_tables:
        frozen = replace(setup, trains_head=False, trains_embedding=False)
        yield "lora.modules_to_save = []", frozen
    movable = not (setup.offload_embedding or setup.trains_embedding or tied)
    if machine.device == "cuda" and movable:
        yield "hardware.offload_embedding = true", replace(setup, offload_embedding=True)
    if setup.optimizer == "adamw":
        yield "train.optimizer = adamw_8bit", replace(setup, optimizer="adamw_8bit")
    if not setup.double_quant:
        yield "quantize.double_quant = true", replace(setup, double_quant=True)
    if setup.dropout:
        yield "lora.dropout = 0", replace(setup, dropout=False)
    if setup.dora:
        yield "lora.use_dora = false", replace(setup, dora=False)
    if setup.activation_checkpointing is not True and setup.activation_checkpointing != 1:
        yield (
            "train.activation_checkpointing = true",
            replace(setup, activation_checkpointing=True),
        )
    if not setup.fused_layers:
        yield "train.fused_layers = true", replace(setup, fused_layers=True)
    if not setup.fused_loss and machine.device == "cuda" and setup.compute_bytes == 2:
        yield "train.fused_loss = true", replace(setup, fused_loss=True)
    if not setup.offload_activations and machine.device == "cuda":
        yield "hardware.offload_activations = true", replace(setup, offload_activations=True)
    if not setup.reshard_after_forward and setup.processes > 1:
        yield "hardware.reshard_after_forward = true", replace(setup, reshard_after_forward=True)
    if setup.replicas > 1:
        yield "hardware.shard_size = auto", replace(setup, replicas=1)


def _halves(value: int, least: int) -> list[int]:
    halves = []
    while value // 2 >= least:
        value //= 2
        halves.append(value)
    return halves


def _process_setting(machine: Machine) -> str:
    return "hardware.gpus" if machine.device == "cuda" else "hardware.cpu_processes"


def _process_counts(machine: Machine, global_batch_size: int) -> list[int]:
    """More GPUs, or fewer CPU processes: each of these has its own copy of the libraries and
    activations.
    """
    valid = [p for p in divisors(global_batch_size) if p % machine.nodes == 0]
    if machine.device == "cuda":
        return [p for p in valid if machine.processes < p <= MOST_GPUS]
    return [p for p in reversed(valid) if p < machine.processes]
