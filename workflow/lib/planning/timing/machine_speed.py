"""The speed of a machine's GPUs, by its table, measurements or a probe, and its basis."""

from dataclasses import dataclass, replace
from typing import Any

from workflow.lib.planning.machine import Machine
from workflow.lib.planning.probes import COMMAND
from workflow.lib.planning.timing.rates import BFLOAT16_SPEEDUP, CPU, CpuRates, rates_of
from workflow.lib.planning.timing.step_time import Clock, Parts, Spread, cpu_seconds, fabric_of
from workflow.lib.planning.work import Work
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.gpu_models import BY_NAME, model_named

# An unknown GPU is ranked as if it were this one; only the order of plans depends on it.
STAND_IN = "NVIDIA A100-SXM4-80GB"


@dataclass(frozen=True)
class Speed:
    """Predicts the seconds of a micro-batch: the kinds of GPUs of a run (none on CPUs)."""

    clocks: tuple[Clock, ...]
    basis: str  # basis of the prediction, for people
    measured: bool = True  # otherwise it only ranks plans
    cpu: CpuRates = CPU

    def parts(self, work: Work, plan: StepPlan, **counts: Any) -> Parts:
        """Seconds of a micro-batch by their use, on the slowest kind of GPU; counts: as of
        `Clock.parts`."""
        if not self.clocks:
            passes, steps = plan.forward_passes, counts.get("micro_batches", 1)
            seconds = cpu_seconds(work, self.cpu, micro_batches=steps, forward_passes=passes)
            return {"matmuls": seconds}
        every = (clock.parts(work, plan, **counts) for clock in self.clocks)
        return max(every, key=lambda parts: sum(parts.values()))

    def spread(self, work: Work, plan: StepPlan, **counts: Any) -> Spread | None:
        """Return the range of a micro-batch on other hosts, on the slowest kind of GPU; None on
        CPUs. Arguments as of `parts`."""
        every = (clock.spread(work, plan, **counts) for clock in self.clocks)
        return max(every, key=lambda spread: spread.most_s, default=None)


def speed_of(machine: Machine, *, compute_bytes: int = 4) -> Speed:
    """Return the speed of a machine; compute_bytes: of the compute dtype, for CPUs."""
    names = sorted(set(machine.gpu_names))
    if not names:
        return _cpu_speed(machine, compute_bytes=compute_bytes)
    clocks = tuple(_clock(machine, name) for name in names)
    unknown = [name for name in names if model_named(name) is None and name not in machine.probes]
    if unknown:
        missing = ", ".join(unknown)
        basis = f"unknown: no speed is recorded for {missing} (`{COMMAND}` measures it there)"
        return Speed(clocks, basis, measured=False)
    network = "; between nodes 400 Gb/s per GPU are assumed" if machine.nodes > 1 else ""
    basis = "recorded work, at rates " + " and ".join(clock.rates.source for clock in clocks)
    return Speed(clocks, basis + network)


def _clock(machine: Machine, name: str) -> Clock:
    gpu, probe = model_named(name) or BY_NAME[STAND_IN], machine.probes.get(name)
    fabric = fabric_of(gpu, gpus_per_node=machine.processes_per_node)
    if probe is not None and (collective := probe.rates.get("collective")):
        fabric = replace(fabric, local=collective / fabric.attained)
    return Clock(gpu, fabric, rates_of(gpu, probe))


def _cpu_speed(machine: Machine, *, compute_bytes: int) -> Speed:
    """The speed of a CPU, which multiplies bfloat16 itself or does not."""
    probe = machine.probes.get(machine.cpu)
    cpu = CPU if probe is None else CPU.probed(probe)
    advice = f" (`{COMMAND}` measures this one)" if probe is None else ""
    if compute_bytes == 4:
        basis = f"rough: {cpu.flops / 1e9:.0f} GFLOP/s per CPU process, {cpu.source}{advice}"
        if machine.bfloat16:
            basis += (
                "; this CPU multiplies bfloat16 itself: model.compute_dtype: bfloat16 would "
                f"take about {1 / BFLOAT16_SPEEDUP:.0%} of this time"
            )
        return Speed((), basis, cpu=cpu)
    if not machine.bfloat16:
        basis = (
            "unknown: this CPU has no matmuls of bfloat16, and how long it takes without was "
            "not measured"
        )
        return Speed((), basis, measured=False)
    cpu = replace(cpu, flops=cpu.flops * BFLOAT16_SPEEDUP)
    basis = (
        f"rough: {cpu.flops / 1e9:.0f} GFLOP/s per CPU process in bfloat16, from the "
        f"ratio of two steps on one machine and from fp32, {cpu.source}{advice}"
    )
    return Speed((), basis, cpu=cpu)
