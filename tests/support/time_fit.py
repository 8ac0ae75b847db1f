"""How the time model's constants were fitted to lines of `tests/gpu/measurements`.

Each measured step is one equation for ten constants, which no single step tells apart. So the fit
starts from known constants: it minimizes the mean pseudo-Huber loss of the relative errors, in
which outliers count little, plus a small pull to the start. Constants are searched by their
logarithms, one after the other, with a step that halves (pattern search, Hooke and Jeeves 1961)."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.support.measurements import recorded_plan
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.planning.timing.gpu_traffic import Traffic, fabric_of, micro_batch_traffic
from workflow.lib.planning.timing.step_time import (
    Constants,
    gpu_parts,
    gpu_seconds,
    launch_seconds,
)
from workflow.lib.planning.timing.step_work import Work, micro_batch_work
from workflow.lib.system.compute_choice import COMPUTE_DTYPE, FLOAT8
from workflow.lib.system.gpu_models import GpuModel

USUAL_ERROR = 0.05  # relative; larger ones count linearly
# of a constant that is e times its start, against 1 of a timing that is off by the usual error
PULL = 0.002
PROFILED = 0.02  # what the parts of a profile count together, against 1 of the steps
# Kind of kernels in a profile -> the parts of the prediction that it has.
KINDS = {
    "products": ("products",),
    "attention": ("attention",),
    "dequantization": ("dequantization",),
    "elementwise and reductions": ("elementwise", "loss", "update"),
}
FIRST_STEP, LAST_STEP = 0.2, 0.004  # of the logarithm of a constant


@dataclass(frozen=True)
class Timing:
    """A measured step: a process's work for each of its micro-batches, and the step's seconds."""

    label: str
    work: Work
    traffic: Traffic
    micro_batches: int
    step_s: float
    parts_s: dict[str, float]
    """Of the step by kinds of kernels, those of `KINDS` that a profile has told."""

    def part_errors(self, gpu: GpuModel, constants: Constants) -> list[float]:
        """Relative errors of the profiled parts."""
        parts = gpu_parts(self.work, gpu, constants=constants, traffic=self.traffic)
        predicted = {kind: sum(parts[name] for name in names) for kind, names in KINDS.items()}
        return [self.micro_batches * predicted[kind] / s - 1 for kind, s in self.parts_s.items()]

    def gpu_bound(self, gpu: GpuModel, constants: Constants) -> float:
        """How many times as long as Python launches the GPU computes."""
        parts = gpu_parts(self.work, gpu, constants=constants, traffic=self.traffic)
        computing_s = sum(s for name, s in parts.items() if not name.startswith("waiting"))
        launch_s = launch_seconds(self.work, constants, self.traffic)
        return computing_s / launch_s if launch_s else math.inf

    def error(self, gpu: GpuModel, constants: Constants) -> float:
        """Relative error of the predicted step; positive if it is too long."""
        micro_s = gpu_seconds(self.work, gpu, constants=constants, traffic=self.traffic)
        return self.micro_batches * micro_s / self.step_s - 1


def serves(line: dict[str, Any], name: str) -> bool:
    """Whether a line is a timing of our engine on such GPUs that the roofline knows."""
    return (
        bool(line.get("measured"))
        and line["peer"] is None
        and set(line["gpu_names"]) == {name}
        and recorded_plan(line).attention != "eager"
        and recorded_plan(line).matmul_dtype in (COMPUTE_DTYPE, FLOAT8)  # once there was int8
        and line["sizes"]["documents"] == 1
    )


def timing_of(line: dict[str, Any], shape: ModelShape, gpu: GpuModel) -> Timing:
    plan, sizes = recorded_plan(line), line["sizes"]
    fabric = fabric_of(gpu, gpus_per_node=plan.processes // line["plan"]["nodes"])
    trained, count = 1 - sizes["documents"] / sizes["seq_len"], sizes["accumulation"]
    kinds = (line["measured"].get("profile") or {"kinds": {}})["kinds"]
    return Timing(
        label=f"{line['case']} x {plan.processes}",
        work=micro_batch_work(shape, plan, trained_share=trained, micro_batches=count),
        traffic=micro_batch_traffic(shape, plan, fabric),
        micro_batches=count,
        step_s=plan.tokens * count / line["measured"]["tokens_per_s_per_process"],
        parts_s={kind: kinds[kind] for kind in KINDS if kinds.get(kind, 0) > 0},
    )


def fit(timings: Sequence[Timing], gpu: GpuModel, *, start: Constants) -> Constants:
    """Return the constants that fit the timings best, near `start` where these do not decide."""
    best, loss, step = start, _loss(timings, gpu, start, start), FIRST_STEP
    while step > LAST_STEP:
        before = loss
        for name in asdict(best):
            for factor in (math.exp(step), math.exp(-step)):
                moved = replace(best, **{name: getattr(best, name) * factor})
                moved_loss = _loss(timings, gpu, moved, start)
                if moved_loss < loss:
                    best, loss = moved, moved_loss
                    break
        step = step if loss < before else step / 2
    return best


def _loss(
    timings: Sequence[Timing], gpu: GpuModel, constants: Constants, start: Constants
) -> float:
    loss = _mean_loss([timing.error(gpu, constants) for timing in timings])
    parts = [error for timing in timings for error in timing.part_errors(gpu, constants)]
    if parts:
        loss += PROFILED * _mean_loss(parts)
    origin = asdict(start)
    pulls = (math.log(value / origin[name]) ** 2 for name, value in asdict(constants).items())
    return loss + PULL * sum(pulls)


def _mean_loss(errors: Sequence[float]) -> float:
    """Return the mean pseudo-Huber loss of relative errors."""
    scaled = (math.log1p(error) / USUAL_ERROR for error in errors)
    return statistics.fmean(math.hypot(1, error) - 1 for error in scaled)
