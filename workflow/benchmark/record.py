"""Lines of `benchmark_run`: one for each case and number of processes."""

from typing import Any, Literal

from pydantic import Field

from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.artifacts.training_record import Check


class Observed(Record, frozen=False):
    """A case in one process; peaks are of the steps, after loading and checks."""

    step_s: list[float] = Field(default=[])  # seconds of each step
    losses: list[float] = Field(default=[])  # loss of each step, nats per token
    grad_norms: list[float] = Field(default=[])  # norm of the gradient of each step
    load_s: float = 0.0  # seconds of loading
    bytes_read: int = 0  # bytes of the base that were read
    setup_allocated_bytes: int = 0  # peak of loading and checks; 0 on a CPU
    allocated_bytes: int = 0  # allocated peak; 0 on a CPU
    reserved_bytes: int = 0  # reserved peak; 0 on a CPU
    host_bytes: int = 0  # peak resident set of the process
    attention: str = ""  # kind of attention that ran
    graphs_off: str | None = None
    """Why micro-batches could not be CUDA graphs; null: they were, or were not to be."""
    checks: list[Check] = Field(default=[])  # checks before the steps


class Measurement(Observed):
    """A case over all processes: largest peaks and slowest load; all else of the main one."""

    tokens_per_s_per_process: float  # over the last two thirds of the steps, without the last
    pairs_per_s_per_process: float | None = None
    """Pairs a second by the median of these steps; null without pairs."""
    allocated_bytes_by_process: list[int]  # `allocated_bytes` of each process
    reserved_bytes_by_process: list[int]  # `reserved_bytes` of each process


class BenchmarkRow(Record):
    """A line: a case with a number of processes, measured or not."""

    format_version: Literal[1] = 1  # version of the line's format
    key: str  # short hash of all facts from the settings, and of the GPUs
    case: str  # name of the case
    title: str  # description of the case, for people
    processes: int  # processes that train
    sizes: dict[str, Any]  # section `benchmark` overridden by the case's own settings
    settings: dict[str, Any]  # the case's own settings of a run
    peer: dict[str, Any] | None  # settings of other software; null for this workflow's engine
    status: Literal["measured", "out_of_memory", "failed", "not_installed", "predicted"]
    """The result; predicted: nothing was to be measured."""
    cause: str | None = None  # why it could not be measured; null if it could
    measured: Measurement | None = None  # the measurement; null if there is none
    gpu_names: list[str] = Field(default=[])
    """Names of the GPUs, one per process; empty if the case cannot run here, or on a CPU."""
    shape: dict[str, Any] | None = None
    """All fields of `ModelShape`, which predict the case again; null if it cannot run here."""
    predicted: dict[str, Any] | None = None
    """Peaks and time as preflight predicts them; null for a peer too."""
    plan: dict[str, Any] | None = None
    """How the case runs, as in preflight.json; null if it cannot run here."""
    provenance: Provenance  # origin of the line
