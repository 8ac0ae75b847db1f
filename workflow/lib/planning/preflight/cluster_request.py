"""A stage's resources on a cluster: memory and time, from preflight's prediction.

Predictions are of the peak and of undisturbed work, so both get a margin: a job with too little is
killed, a job with too much only waits longer. A repeated job asks for more memory."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.lib.artifacts.preflight_record import Forecast
from workflow.lib.checkpoints.files.safetensors_headers import read_headers
from workflow.lib.model.architecture.model_shape import ModelShape, described_config, read_shape
from workflow.lib.planning.machine import requested_processes
from workflow.lib.planning.model_sizes import Shape, chosen_method, rounding_seconds
from workflow.lib.planning.preflight.checks import read_machine, read_tokens
from workflow.lib.planning.preflight.decision import Decision
from workflow.lib.planning.preflight.plan_search import Recorder
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.preflight.questions import predicted
from workflow.lib.settings.config import RunConfig
from workflow.lib.system.units import MIB

MEMORY_ROOM = 1.25
TIME_ROOM = 1.5
START_MIN = 20  # reading the weights, checks, and writing the results
MEASURING_MIN = 4 * 60  # an evaluation, added to a training's time
UNKNOWN_MIN = 24 * 60  # training on GPUs whose speed is not known
# Measured: about 1 GiB for Python with torch and Transformers; the rest is for Snakemake, rows and
# buffers.
PROGRAM_BYTES = 3 * 2**30
# Beside the training processes: Snakemake in the job, and torchrun with its imports.
LAUNCH_BYTES = 3 * 2**29
# Reading, copying and writing a base and its original, at 200 MB/s from a busy shared disk.
DISK_BYTES_PER_S = 200e6
# Of a calibration: passes of its rows through a layer, and the held-out tokens of three models
# (`quantization.calibrated_base`).
CALIBRATION_PASSES = 6
MEASURED_MODELS, MEASURED_TOKENS = 3, 32_768
# The CPU's is below what two cores reached with SmolLM2-135M (about 130e9, Intel
# Xeon, torch 2.13, 2026-11-23); the GPU's is assumed.
CALIBRATION_FLOPS_GPU, CALIBRATION_FLOPS_CPU = 50e12, 50e9
# Of sensitivities: rows, a text, and shipped texts of at most 10,240 tokens; two forward passes and
# a backward of states and weights (`quantization.sensitivity`).
SENSITIVITY_TOKENS, SENSITIVITY_PASSES = 2 * 8192 + 10_240, 4
# Host bytes per weight of experts: the original, and two copies of a part of the checkpoint.
STACK_BYTES = 6


RecorderOf = Callable[[Mapping[str, Any], ModelShape], AbstractContextManager[Recorder]]
"""Returns the recorder of plans of a config.json's model."""


@dataclass(frozen=True)
class Allocation:
    """A job's resources on each of its nodes."""

    mem_mb: int  # MiB, which clusters call MB
    runtime: int  # minutes


def training(
    run: RunConfig, *, model: str, description: str, manifest: str, recorder: RecorderOf
) -> Allocation:
    """Return the needs of `finetune`, by description and manifest. Raises `UserError` as preflight
    does, `FileNotFoundError` before there is an input."""
    decision, forecasted = _decide(run, Path(description), manifest, recorder)
    minutes = _training_minutes(forecasted) + START_MIN
    return _allocation(decision.chosen.host_bytes + LAUNCH_BYTES, minutes)


def _training_minutes(forecasted: Forecast) -> float:
    total_h = forecasted.time.total_h
    return UNKNOWN_MIN if total_h is None else total_h * 60 * TIME_ROOM


def reading(
    run: RunConfig, *, model: str, description: str, manifest: str, recorder: RecorderOf
) -> Allocation:
    """Return the needs of `consolidate` and `evaluate_run`, which load the base, and the original.
    Weights pass through the host; the time of tasks is unknown."""
    decision, forecasted = _decide(run, Path(description), manifest, recorder)
    base = decision.disk_bytes["base"]
    merged = run.export.shard_gib * 2**30 if run.export.merged else 0
    shape = read_shape(Path(description))
    original = (shape.quantized_weights + shape.plain_weights) * shape.source_bytes
    minutes = (
        MEASURING_MIN
        + _training_minutes(forecasted)
        + 4 * (base + original) / DISK_BYTES_PER_S / 60
    )
    return _allocation(PROGRAM_BYTES + base + 2 * merged, minutes)


def quantizing(run: RunConfig, *, model: str, description: str, manifest: str) -> Allocation:
    """Return the needs of `quantize_base`: three copies of the largest tensor, in 32 bits."""
    tensors = read_headers(sorted(Path(model).glob("*.safetensors")))
    largest = 4 * max(math.prod(tensor.shape) for tensor in tensors.values())
    stored = sum(tensor.num_bytes for tensor in tensors.values())
    minutes = START_MIN + 4 * stored / DISK_BYTES_PER_S / 60
    host_bytes = PROGRAM_BYTES + 3 * largest
    if not run.quantize.calibrates:
        return _allocation(host_bytes, minutes)
    shape = read_shape(Path(description))  # tokens come after it, so it exists
    method, _ = chosen_method(run.quantize.method, _weights(shape))
    if method == "calibrated":
        host_bytes += _calibration_bytes(run, shape)
        minutes += _calibration_minutes(run, shape)
    return _allocation(host_bytes, minutes)


def measuring(run: RunConfig, *, model: str, description: str, manifest: str) -> Allocation:
    """Return the needs of `measure_sensitivity`: the states of all rows between all layers, and
    four copies of a layer (its weights, their changes and gradients), in fp32."""
    shape = read_shape(Path(description))  # tokens come after it, so it exists
    states = 4 * SENSITIVITY_TOKENS * shape.hidden_size * (shape.num_layers + 2)
    layer = 4 * shape.largest(lambda layer: layer.num_weights)
    flops = 2 * SENSITIVITY_PASSES * SENSITIVITY_TOKENS * shape.total(lambda of: of.used_weights)
    cuda = requested_processes(run.hardware)[0] == "cuda"
    seconds = flops / (CALIBRATION_FLOPS_GPU if cuda else CALIBRATION_FLOPS_CPU)
    seconds += 2 * shape.source_bytes * shape.quantized_weights / DISK_BYTES_PER_S
    return _allocation(PROGRAM_BYTES + states + 4 * layer, START_MIN + seconds / 60 * TIME_ROOM)


def _calibration_bytes(run: RunConfig, shape: ModelShape) -> int:
    """Hidden states of all rows before and after a layer, and for a mixture those of its experts;
    without a GPU also a layer and the matrices of its widest linear, all in fp32."""
    rows = run.quantize.calibration_tokens + MEASURED_MODELS * MEASURED_TOKENS
    experts = shape.largest(lambda of: sum(x.num_weights for x in of.linears if x.experts > 1))
    hidden = (3 if experts else 2) * 4 * rows * shape.hidden_size
    if requested_processes(run.hardware)[0] == "cuda":
        return hidden + STACK_BYTES * experts
    layer = 4 * shape.largest(lambda layer: layer.num_weights)
    widest = max(linear.in_features for kind in shape.kinds for linear in kind.linears)
    return hidden + 3 * layer + 4 * 4 * widest**2


def _calibration_minutes(run: RunConfig, shape: ModelShape) -> float:
    """Forward passes for each group of linears and for measurements, and rounding by column."""
    cuda = requested_processes(run.hardware)[0] == "cuda"
    tokens = CALIBRATION_PASSES * run.quantize.calibration_tokens
    tokens += MEASURED_MODELS * MEASURED_TOKENS
    flops = 2 * tokens * shape.total(lambda layer: layer.used_weights)
    if cuda:
        seconds = flops / CALIBRATION_FLOPS_GPU + rounding_seconds(_weights(shape))
    else:
        # errors are fed back to half of the columns
        flops += shape.total(lambda of: sum(x.num_weights * x.in_features for x in of.linears))
        seconds = flops / CALIBRATION_FLOPS_CPU
    return seconds / 60 * TIME_ROOM


def _weights(shape: ModelShape) -> list[Shape]:
    """Return the shapes of all linears and experts, those of each layer."""
    return [
        (linear.experts, linear.out_features, linear.in_features)
        for number, kind in enumerate(shape.kinds)
        for linear in kind.linears
        for _ in range(shape.counts[number])
    ]


def _decide(
    run: RunConfig, description: Path, manifest: str, recorder: RecorderOf
) -> tuple[Decision, Forecast]:
    """Return the decision on a run, by lines between recordings, and its forecast; with
    `quantize.keep: auto` as if all stayed in 16 bits."""
    shape, tokens = read_shape(description), read_tokens(Path(manifest))
    machine = read_machine(run.hardware)
    with recorder(described_config(description), shape) as record:
        planned = PlannedRun(run, shape, machine, tokens, record, estimate=True)
        planned = planned.in_16_bits() if run.quantize.measures else planned
        return predicted(planned, advise=True)


def _allocation(host_bytes: float, minutes: float) -> Allocation:
    return Allocation(math.ceil(host_bytes * MEMORY_ROOM / MIB), math.ceil(minutes))
