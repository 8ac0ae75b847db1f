"""How fast a machine's GPUs are, by its table or by measurements, and what that rests on."""

from dataclasses import dataclass
from typing import Any

from workflow.lib.planning.machine import Machine
from workflow.lib.planning.timing.gpu_traffic import fabric_of
from workflow.lib.planning.timing.rates import rates_of
from workflow.lib.planning.timing.step_time import (
    CPU_BFLOAT16_FLOPS,
    CPU_FLOPS,
    Clock,
    Parts,
    cpu_seconds,
)
from workflow.lib.planning.work import Work
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.gpu_models import BY_NAME

# A GPU that no table knows is ranked as if it were this one; only the order of plans depends on it.
STAND_IN = "NVIDIA A100-SXM4-80GB"


@dataclass(frozen=True)
class Speed:
    """What predicts the seconds of a micro-batch: the kinds of GPUs of a run (none on CPUs)."""

    clocks: tuple[Clock, ...]
    basis: str  # what the prediction rests on, for people
    known: bool = True  # otherwise it only ranks plans
    cpu_flops: float = CPU_FLOPS  # FLOP/s of a process on CPUs

    def parts(
        self,
        work: Work,
        plan: StepPlan,
        *,
        num_layers: int,
        trained_share: float,
        micro_batches: int = 1,
    ) -> Parts:
        """Seconds of a micro-batch by what they are spent on, on the slowest kind of GPU."""
        if not self.clocks:
            seconds = cpu_seconds(work, flops=self.cpu_flops, micro_batches=micro_batches)
            return {"matmuls": seconds}
        counts: dict[str, Any] = {"num_layers": num_layers, "trained_share": trained_share}
        counts["micro_batches"] = micro_batches
        every = (clock.parts(work, plan, **counts) for clock in self.clocks)
        return max(every, key=lambda parts: sum(parts.values()))


def speed_of(machine: Machine, *, compute_bytes: int = 4) -> Speed:
    """Return how fast a machine is; compute_bytes: of the compute dtype, for CPUs."""
    names = sorted(set(machine.gpu_names))
    if not names:
        return _cpu_speed(bfloat16=machine.bfloat16, compute_bytes=compute_bytes)
    gpus = [BY_NAME.get(name, BY_NAME[STAND_IN]) for name in names]
    per_node = machine.processes_per_node
    clocks = tuple(
        Clock(gpu, fabric_of(gpu, gpus_per_node=per_node), rates_of(gpu)) for gpu in gpus
    )
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        basis = f"unknown: no speed is recorded for {', '.join(unknown)}"
        return Speed(clocks, basis, known=False)
    network = "; between nodes 400 Gb/s per GPU are assumed" if machine.nodes > 1 else ""
    basis = "recorded work, at rates " + " and ".join(clock.rates.source for clock in clocks)
    return Speed(clocks, basis + network)


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
