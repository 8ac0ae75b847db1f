"""`preflight.json`: preflight's decisions and predictions, and the plan of later stages.

The file is written from these types, a key per field and in their order, and read back into them. A
file with a missing or unknown field is of another version and refused: a stage would silently
ignore an option that it does not know."""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.step_plan.plan import StepPlan


class PreflightRecord(Record, extra="forbid"):
    """Base of all parts of `preflight.json`: no other fields."""


def _complete(plan: Any) -> Any:
    """Raise an error if a document lacks a field of the plan: defaults change with versions."""
    if isinstance(plan, dict) and (absent := {x.name for x in fields(StepPlan)} - plan.keys()):
        raise PydanticCustomError("missing", "{fields}", {"fields": sorted(absent)})
    return plan


class Term(PreflightRecord):
    """One addend of the predicted peak."""

    name: str  # user of the memory
    bytes: int  # its bytes, per process
    explanation: str  # description


class Estimate(PreflightRecord):
    """Predicted time; None if the speed of the GPU is unknown, as `basis` then says."""

    step_s: float | None  # seconds of an optimizer step
    total_h: float | None  # hours of the training
    tokens_per_s_per_process: float | None  # tokens a second, of each process
    cost: float | None  # in the currency of `hardware.price_per_gpu_hour`; None without a price too
    parts_s: dict[str, float]  # of a micro-batch, by use
    basis: str  # basis of the prediction, in words
    step_range_s: tuple[float, float] | None = None
    """Range of seconds of such steps on other hosts; None if unknown."""
    range_due_to: str = ""  # largest cause of that range, in words


class TriedPlan(PreflightRecord):
    choice: dict[str, bool | int | float | str]
    """Fields of the plan that the search decides, and their values here."""
    host_bytes: int  # host memory of a node's processes together
    peak_bytes: int  # predicted peak of each process, allocated
    relative_time: float  # time of a step; 1 for the chosen plan
    fits: bool  # whether device and host hold it
    why: str  # why it was chosen or not

    def plan(self, followed: StepPlan) -> StepPlan:
        """Return this plan; followed: the run's."""
        return followed.changed(self.choice)


class BitPoint(PreflightRecord):
    """A set of linears in 16 bits: the most loss per byte first."""

    share: float  # of the weights of all linears and stacks
    peak_bytes: int  # predicted peak of each process, allocated
    nats: float  # expected nats a token that the others cost in 4 bits
    verdict: str  # whether it is taken, or why not


class BitCurve(PreflightRecord):
    """What 16 bits cost and bring (`quantize.keep: auto`)."""

    kept: int  # linears and stacks in 16 bits
    weights: int  # all of them
    points: list[BitPoint]  # by their share
    slower: str | None = None  # what another, slower plan would hold


class Forecast(PreflightRecord):
    """Preflight's decisions and predictions; bytes are of each process unless stated otherwise."""

    verdict: Literal["fits", "does_not_fit"]  # whether the run can be trained on this machine
    reason: str  # Why, in words
    plan: Annotated[StepPlan, BeforeValidator(_complete)]  # how the training runs
    method: Literal["replay", "lines"]  # method of the predicted peaks
    terms: list[Term]  # of the peak phase; they add up to the peak
    phases: dict[str, int]  # peak by phase
    peak_phase: str  # the phase that needs most
    peak_bytes: int  # allocated
    allocator_slack_bytes: int  # reserved beyond that
    reserved_bytes: int  # the sum of both: PyTorch's memory of the device
    outside_allocator_bytes: int  # CUDA context and communication
    capacity_bytes: int  # a process's memory
    margin_bytes: int  # `hardware.memory_margin_gib`
    host_bytes: int  # of a node's processes together, at the peak
    host_capacity_bytes: int | None  # their capacity; None if unknown
    disk_bytes: dict[str, int]  # by artifact
    disk_free_bytes: int | None  # None without a disk
    time: Estimate  # predicted time and cost
    candidates: list[TriedPlan]  # the tried plans
    bits: BitCurve | None = None  # with `quantize.keep: auto`
    model: dict[str, Any]
    """Facts of the model's shape (`ModelShape`), and its numbers of parameters."""

    @property
    def num_layers(self) -> int:
        return len(self.model["order"])


class Preflight(Forecast):
    """`preflight_run/preflight.json`: a forecast with its provenance."""

    advice: ClassVar[str] = (
        "Another version of the workflow may have written it: delete this file and run "
        "`snakemake --cores all preflight` again."
    )

    provenance: Provenance  # origin of the file
