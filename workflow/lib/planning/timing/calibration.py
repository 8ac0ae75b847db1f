"""The time model's constants fitted to measurements of the benchmark (`BenchmarkRow`).

Each measured step is one equation for ten constants, which no single step tells apart. So the fit
starts from known constants and leaves them only as far as the measurements ask for: it minimizes
the mean pseudo-Huber loss of the relative errors, in which a few outliers count little, plus a
small pull to the start. Where a step was profiled, the parts that its kernels tell apart count too,
so that they add up for the right reasons. Constants are searched by their logarithms, one after the
other, with a step that halves (pattern search, Hooke and Jeeves 1961)."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from workflow.lib.model.architecture.model_shape import ModelShape, shape_of_document
from workflow.lib.planning.timing.gpu_traffic import Traffic, fabric_of, micro_batch_traffic
from workflow.lib.planning.timing.step_time import (
    Constants,
    gpu_parts,
    gpu_seconds,
    launch_seconds,
)
from workflow.lib.planning.timing.step_work import Work, micro_batch_work
from workflow.lib.step_plan.plan import StepPlan
from workflow.lib.system.compute_choice import COMPUTE_DTYPE, FLOAT8
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import verified
from workflow.lib.system.gpu_models import GpuModel

USUAL_ERROR = 0.05  # relative; larger ones count linearly
# of a constant that is e times its start, against 1 of a timing that is off by the usual error
PULL = 0.002
PROFILED = 0.02  # what the parts of a profile count together, against 1 of the steps
# Kind of kernels in a profile (`profiling.KINDS`) -> the parts of the prediction that it has.
KINDS = {
    "products": ("products",),
    "attention": ("attention",),
    "dequantization": ("dequantization",),
    "elementwise and reductions": ("elementwise", "loss", "update"),
}
FIRST_STEP, LAST_STEP = 0.2, 0.004  # of the logarithm of a constant


@dataclass(frozen=True)
class Timing:
    """A measured step: what a process did for each micro-batch, and the step's seconds."""

    label: str
    work: Work
    traffic: Traffic
    micro_batches: int
    step_s: float
    parts_s: Mapping[str, float] = field(default_factory=dict)
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


def read_timings(path: Path, gpu: GpuModel, *, name: str) -> list[Timing]:
    """Return the timings of our engine in `path` that were measured on GPUs called `name` alone;
    gpu: its data sheet.

    Left out are rows of several documents, whose attention is not that of whole rows, and eager
    attention, which the roofline does not know. Raises `UserError` if the file cannot be read."""
    try:
        lines = [_row(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        return [timing_of(line, gpu) for line in lines if serves(line, name)]
    except OSError as error:
        raise UserError(
            f"hardware.calibration = {str(path)!r}: it cannot be read ({error.strerror}). Name a "
            "measurements.jsonl of the benchmark, or set it to null."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise UserError(
            f"hardware.calibration = {str(path)!r}: it is no measurements.jsonl of the benchmark "
            f"({error!r}). Measure again with `workflow.scripts.benchmark_run`, or set it to null."
        ) from None


def _row(line: str) -> dict[str, Any]:
    """Return what a line says; of one that an earlier version measured, unchecked."""
    row: dict[str, Any] = json.loads(line)
    return verified(row) if "sha256" in row else row


def serves(line: dict[str, Any], name: str) -> bool:
    """Whether a line is a timing of our engine on such GPUs that the roofline knows."""
    return (
        line["status"] == "measured"
        and line["peer"] is None
        and set(line["gpu_names"]) == {name}
        and recorded_plan(line).attention != "eager"
        and recorded_plan(line).matmul_dtype in (COMPUTE_DTYPE, FLOAT8)  # once there was int8
        and line["sizes"]["documents"] == 1
    )


def timing_of(line: dict[str, Any], gpu: GpuModel) -> Timing:
    """Return what a line of measurements.jsonl records."""
    shape, setup = recorded_case(line)
    sizes = line["sizes"]
    tokens = setup.tokens * sizes["accumulation"]
    trained = 1 - sizes["documents"] / sizes["seq_len"]
    nodes = line["plan"]["nodes"]
    fabric = fabric_of(gpu, gpus_per_node=setup.processes // nodes)
    return Timing(
        label=f"{line['case']} x {setup.processes}",
        work=micro_batch_work(
            shape, setup, trained_share=trained, micro_batches=sizes["accumulation"]
        ),
        traffic=micro_batch_traffic(shape, setup, fabric),
        micro_batches=sizes["accumulation"],
        step_s=tokens / line["measured"]["tokens_per_s_per_process"],
        parts_s=_profiled_parts(line["measured"].get("profile")),
    )


def _profiled_parts(profile: dict[str, Any] | None) -> dict[str, float]:
    kinds = profile["kinds"] if profile else {}
    return {kind: kinds[kind] for kind in KINDS if kinds.get(kind, 0) > 0}


def recorded_case(line: dict[str, Any]) -> tuple[ModelShape, StepPlan]:
    """Return the shape and the plan that a line of measurements.jsonl records."""
    return shape_of_document(line["shape"]), recorded_plan(line)


def recorded_plan(line: dict[str, Any]) -> StepPlan:
    """Return the plan of a line. Earlier lines have a part of it in `setup`."""
    plan = line["plan"]
    setup = dict(line.get("setup") or plan)
    for old, new in (("products", "matmul_dtype"), ("products_in", "matmul_passes")):
        if old in setup:
            setup[new] = setup.pop(old)
    if "setup" not in line:
        return StepPlan.of(setup)
    for name in ("fixed", "accumulates", "compute_bytes"):
        setup.pop(name, None)
    return StepPlan.of(
        setup
        | {
            "device": plan["device"],
            "dropout": 0.05 if setup["dropout"] else 0.0,  # whether any was said
            "accumulation_steps": plan["accumulation_steps"],
            "compute_dtype": plan["compute_dtype"],
            "cuda_graphs": plan.get("cuda_graphs", False),
        }
    )


def fit(timings: Sequence[Timing], gpu: GpuModel, *, start: Constants) -> Constants:
    """Return the constants that fit the timings best, near `start` where these do not decide."""
    best, loss = start, _loss(timings, gpu, start, start)
    step = FIRST_STEP
    while step > LAST_STEP:
        constants, new_loss = _around(timings, gpu, best, loss, step=step, start=start)
        if new_loss < loss:
            best, loss = constants, new_loss
        else:
            step /= 2
    return best


def _around(
    timings: Sequence[Timing],
    gpu: GpuModel,
    best: Constants,
    loss: float,
    *,
    step: float,
    start: Constants,
) -> tuple[Constants, float]:
    """Move constants up or down by `step` where that is better; return the last and its loss."""
    for name, value in asdict(best).items():
        for factor in (math.exp(step), math.exp(-step)):
            moved = replace(best, **{name: value * factor})
            moved_loss = _loss(timings, gpu, moved, start)
            if moved_loss < loss:
                best, loss = moved, moved_loss
                break
    return best, loss


def _loss(
    timings: Sequence[Timing], gpu: GpuModel, constants: Constants, start: Constants
) -> float:
    fitted = _mean_loss([timing.error(gpu, constants) for timing in timings])
    parts = [error for timing in timings for error in timing.part_errors(gpu, constants)]
    if parts:
        fitted += PROFILED * _mean_loss(parts)
    origin = asdict(start)
    pulls = (math.log(value / origin[name]) ** 2 for name, value in asdict(constants).items())
    return fitted + PULL * sum(pulls)


def _mean_loss(errors: Sequence[float]) -> float:
    """Return the mean pseudo-Huber loss of relative errors."""
    scaled = (math.log1p(error) / USUAL_ERROR for error in errors)
    return statistics.fmean(math.hypot(1, error) - 1 for error in scaled)
