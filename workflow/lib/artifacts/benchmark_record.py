"""`measurements.jsonl` of `benchmark_run`: a line per case and number of processes."""

from typing import Any, Literal

from pydantic import Field

from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.artifacts.training_record import Check


class Profile(Record):
    """Where the time of one more step goes."""

    step_s: float
    """Seconds of the step."""
    idle_s: float
    """Of these, those in which the GPU does nothing."""
    kinds: dict[str, float]
    """Seconds by kind of kernel; empty on a CPU. Kinds on several streams overlap."""
    kernels: list[tuple[str, float, int]]
    """Name, seconds and calls of the kernels that take longest together."""


class CheckpointCost(Record):
    """What a checkpoint costs a training."""

    step_s: float
    """Median seconds of a step in the blocks without a checkpoint."""
    cost_s: float
    """Median seconds that a checkpoint adds to a block."""
    blocks_with_s: list[float]
    """Seconds of each block with a checkpoint."""
    blocks_without_s: list[float]
    """Seconds of each block without one."""
    still_s: float
    """Median seconds of a checkpoint in which training stands still."""
    bytes: int
    """Size of a checkpoint."""


class WorkerMeasurement(Record):
    """What the workers of a case measured."""

    tokens_per_s_per_process: float
    """Tokens a second of the main process, over the last two thirds of the steps: the device is
    waited for before and behind them."""
    allocated_bytes: int
    """Largest allocated peak of any process while it trains; 0 on a CPU."""
    reserved_bytes: int
    """Largest reserved peak of any process while it trains; 0 on a CPU."""
    setup_allocated_bytes: int
    """Largest allocated peak of any process while it loads and checks."""
    host_bytes: int
    """Largest resident set of any process."""
    load_s: float
    """Seconds of the slowest load."""
    bytes_read: int
    """Most bytes of the base that a process read."""
    allocated_bytes_by_process: list[int]
    """`allocated_bytes` of each process."""
    reserved_bytes_by_process: list[int]
    """`reserved_bytes` of each process."""
    gemm_flops_per_s: float
    """FLOP/s at which a process multiplies matrices of the model's shapes, median."""
    step_s: list[float]
    """Seconds of each step."""
    losses: list[float]
    """Loss of each step, nats per token."""
    grad_norms: list[float]
    """Norm of the gradient of each step."""
    attention: str
    """Kind of attention that ran."""
    graphs_off: str | None = None
    """Why micro-batches could not be CUDA graphs; null: they were, or were not to be."""
    profile: Profile | None
    """Where the time of one more step goes; null if that was not asked for."""
    checkpoint: CheckpointCost | None
    """What a checkpoint costs; null if that was not asked for."""
    checks: list[Check]
    """What was tested before the steps."""


class Measurement(WorkerMeasurement):
    """The measurement of a case, with its work."""

    model_flops_per_s: float
    """Least work of the trained tokens, FLOP/s of a process."""
    model_flops_utilisation: float
    """The same as a share of `gemm_flops_per_s`."""


class Predicted(Record):
    """What preflight predicts for a case."""

    peak_bytes: int
    """Peak that is allocated, per process; on a CPU with the process itself."""
    reserved_bytes: int
    """The same with what the allocator reserves beyond it."""
    phases: dict[str, int]
    """Bytes of each phase of a step, per process."""
    terms: dict[str, int]
    """Bytes of each addend of the peak phase, per process."""
    host_bytes: int
    """Memory that all processes need of a host."""
    step_s: float | None
    """Seconds of a step; null where the speed of the GPU is not known."""
    tokens_per_s_per_process: float | None
    """Tokens a second, of each process; null as `step_s`."""
    basis: str
    """What the predicted time rests on, in words."""


class BenchmarkRow(Record):
    """A line of `measurements.jsonl`: a case with a number of processes, measured or not."""

    format_version: Literal[1]
    """Version of the line's format."""
    key: str
    """Short hash of all that follows from the settings, and of the GPUs."""
    title: str
    """What the case is, for people."""
    processes: int
    """Processes that train."""
    sizes: dict[str, Any]
    """Section `benchmark` with the case's own settings laid over it."""
    settings: dict[str, Any]
    """Settings of a run that are the case's own."""
    peer: dict[str, Any] | None
    """Settings of other software; null for this workflow's engine."""
    case: str
    """Name of the case."""
    measured: Measurement | None
    """The measurement; null if there is none."""
    provenance: Provenance
    """What made the line."""
    gpu_names: list[str] = Field(default=[])
    """Names of the GPUs, one per process; absent if the case cannot run here."""
    shape: dict[str, Any] | None = None
    """All fields of `ModelShape`, which predict the case again; absent as `gpu_names`."""
    setup: dict[str, Any] | None = None
    """All fields of `Setup`; null for a peer, absent as `gpu_names`."""
    predicted: Predicted | None = None
    """The prediction; null for a peer, absent as `gpu_names`."""
    plan: dict[str, Any] | None = None
    """How the case runs, as in preflight.json; absent as `gpu_names`."""
    status: Literal["measured", "out_of_memory", "failed", "not_installed", "not_run"]
    """What came of it."""
    cause: str | None
    """Why it was not measured; null if it was."""


class MeasuredRow(BenchmarkRow):
    """A line whose case was measured."""

    measured: Measurement
    """The measurement."""
