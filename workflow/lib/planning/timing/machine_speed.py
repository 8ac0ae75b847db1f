"""How fast a machine's GPUs are, by its table or by measurements, and what that rests on."""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.machine import Machine
from workflow.lib.planning.timing.calibration import fit, read_timings
from workflow.lib.planning.timing.gpu_traffic import Fabric, fabric_of, micro_batch_traffic
from workflow.lib.planning.timing.step_time import (
    BY_GPU,
    CPU_BFLOAT16_FLOPS,
    CPU_FLOPS,
    Constants,
    Parts,
    constants_of,
    cpu_seconds,
    gpu_parts,
)
from workflow.lib.planning.timing.step_work import micro_batch_work
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.errors import setting_error
from workflow.lib.system.gpu_models import BY_NAME, GpuModel
from workflow.lib.system.hardware import threads_of_job

# A GPU that no table knows is ranked as if it were this one; only the order of plans depends on it.
STAND_IN = "NVIDIA A100-SXM4-80GB"
FITTED_ON = "NVIDIA H200"


@dataclass(frozen=True)
class Platform:
    """A kind of GPU of a run, how it is connected, and its constants."""

    gpu: GpuModel
    fabric: Fabric
    constants: Constants


@dataclass(frozen=True)
class Speed:
    """What predicts the seconds of a micro-batch: the kinds of GPUs of a run (none on CPUs)."""

    platforms: tuple[Platform, ...]
    basis: str
    """What the prediction rests on, for people."""
    known: bool = True
    """Otherwise it only ranks plans."""
    cpu_flops: float = CPU_FLOPS
    """FLOP/s of a process on CPUs."""
    threads: int = 1
    """Of an evaluation on CPUs."""

    def parts(
        self, shape: ModelShape, setup: StepPlan, *, trained_share: float, micro_batches: int = 1
    ) -> Parts:
        """Seconds of a micro-batch by what they are spent on, on the slowest kind of GPU."""
        work = micro_batch_work(
            shape, setup, trained_share=trained_share, micro_batches=micro_batches
        )
        if not self.platforms:
            return {"products": cpu_seconds(work, flops=self.cpu_flops)}
        by_platform = (
            gpu_parts(
                work,
                platform.gpu,
                constants=platform.constants,
                traffic=micro_batch_traffic(shape, setup, platform.fabric),
            )
            for platform in self.platforms
        )
        return max(by_platform, key=lambda parts: sum(parts.values()))


def speed_of(machine: Machine, *, calibration: str | None, compute_bytes: int = 4) -> Speed:
    """Return how fast a machine is; calibration: a measurements.jsonl of the benchmark, made on
    GPUs of its kinds.

    compute_bytes: of the compute dtype; on CPUs speed depends on it.

    Raises `UserError` if that file cannot be read or says nothing of a kind of GPU that the machine
    has."""
    names = sorted(set(machine.gpu_names))
    if not names:
        speed = _cpu_speed(bfloat16=machine.bfloat16, compute_bytes=compute_bytes)
        return replace(speed, threads=threads_of_job())
    if calibration is not None:
        return _calibrated(machine, names, Path(calibration))
    platforms = tuple(_platform(name, machine) for name in names)
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        basis = (
            f"unknown: no speed is recorded for {', '.join(unknown)}; hardware.calibration "
            "would give it"
        )
        return Speed(platforms, basis, known=False)
    return Speed(platforms, _basis(names) + _network(machine))


def _basis(names: list[str]) -> str:
    """Return what the shipped constants rest on."""
    basis = f"roofline with constants fitted to measurements on {FITTED_ON}"
    others = [name for name in names if name != FITTED_ON]
    for there, words in ((True, "and compared with steps there"), (False, "not measured there")):
        scaled = [name for name in others if (name in BY_GPU) == there]
        if scaled:
            basis += f", scaled by data sheets to {', '.join(scaled)}, {words}"
    return basis


def _cpu_speed(*, bfloat16: bool, compute_bytes: int) -> Speed:
    """The speed of a CPU, which multiplies bfloat16 itself or does not."""
    if compute_bytes == 4:
        basis = f"rough: {CPU_FLOPS / 1e9:.0f} GFLOP/s per CPU process, measured on one machine"
        if bfloat16:
            share = CPU_FLOPS / CPU_BFLOAT16_FLOPS
            basis += (
                "; this CPU multiplies bfloat16 itself: model.compute_dtype: bfloat16 would "
                f"take about {share:.0%} of this time"
            )
        return Speed((), basis)
    if not bfloat16:
        basis = (
            "unknown: this CPU has no matmuls of bfloat16, and how long it takes without was "
            "not measured"
        )
        return Speed((), basis, known=False)
    basis = (
        f"rough: {CPU_BFLOAT16_FLOPS / 1e9:.0f} GFLOP/s per CPU process in bfloat16, from the "
        "ratio of two steps on one machine"
    )
    return Speed((), basis, cpu_flops=CPU_BFLOAT16_FLOPS)


def _platform(name: str, machine: Machine, constants: Constants | None = None) -> Platform:
    """constants: fitted ones; None: the shipped ones."""
    gpu = BY_NAME.get(name, BY_NAME[STAND_IN])
    fabric = fabric_of(gpu, gpus_per_node=machine.processes_per_node)
    return Platform(gpu, fabric, constants or constants_of(gpu))


def _network(machine: Machine) -> str:
    return "; between nodes 400 Gb/s per GPU are assumed" if machine.nodes > 1 else ""


def _calibrated(machine: Machine, names: list[str], path: Path) -> Speed:
    """Fit each kind of GPU to its own measurements."""
    platforms, bases = [], []
    for name in names:
        gpu = BY_NAME.get(name, BY_NAME[STAND_IN])
        timings = read_timings(path, gpu, name=name)
        if not timings:
            raise setting_error(
                "hardware.calibration",
                str(path),
                f"it has no measured step of our engine on {name} that can be used",
                "Run the target benchmark on such a GPU and name its measurements.jsonl, or set it "
                "to null",
            )
        constants = fit(timings, gpu, start=constants_of(gpu))
        errors = [abs(timing.error(gpu, constants)) for timing in timings]
        platforms.append(_platform(name, machine, constants))
        bases.append(
            f"{len(timings)} measurements on {name} (median {statistics.median(errors):.1%} off, "
            f"worst {max(errors):.1%})"
        )
    basis = f"roofline fitted to {'; '.join(bases)} of {path.name}"
    return Speed(tuple(platforms), basis + _network(machine))
