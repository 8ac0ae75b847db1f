"""`preflight.json`: what preflight decides and predicts, and the plan that the later stages follow.

The file is written from these types, a key per field and in their order, and read back into them.
A file that lacks a field or has another one is of another version and refused: a lever that a stage
does not know of would be left out without a word."""

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from workflow.lib.artifacts.records import Provenance, Record
from workflow.lib.step_plan.plan import StepPlan


class PreflightRecord(Record, extra="forbid"):
    """Base of all parts of `preflight.json`: no field but these."""


def _complete(plan: Any) -> Any:
    """Raise an error if a document lacks a field of the plan: defaults change with versions."""
    if isinstance(plan, dict) and (absent := {x.name for x in fields(StepPlan)} - plan.keys()):
        raise PydanticCustomError("missing", "{fields}", {"fields": sorted(absent)})
    return plan


class Term(PreflightRecord):
    """One addend of the predicted peak."""

    name: str  # what takes the memory
    bytes: int  # how much of it, per process
    explanation: str  # what it is, in words


class Estimate(PreflightRecord):
    """Predicted time; None where the speed of the GPU is not known, as `basis` then says."""

    step_s: float | None  # seconds of an optimizer step
    total_h: float | None  # hours of the training
    tokens_per_s_per_process: float | None  # tokens a second, of each process
    cost: float | None  # in the currency of `hardware.price_per_gpu_hour`; None without a price too
    parts_s: dict[str, float]  # of a micro-batch, by what it is spent on
    basis: str  # what the prediction rests on, in words
    step_range_s: tuple[float, float] | None = None
    """Seconds within which steps like this one lay on other hosts; None: not known, or not said."""
    range_due_to: str = ""  # what makes most of that range, in words


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


class Forecast(PreflightRecord):
    """What preflight decides and predicts; bytes are of each process where nothing else is said."""

    verdict: Literal["fits", "does_not_fit"]  # whether the run can be trained on this machine
    reason: str  # Why, in words
    plan: Annotated[StepPlan, BeforeValidator(_complete)]  # how the training runs
    method: Literal["replay", "lines"]  # what the peaks are predicted by
    terms: list[Term]  # of the peak phase; they add up to the peak
    phases: dict[str, int]  # peak by phase
    peak_phase: str  # the phase that needs most
    peak_bytes: int  # allocated
    allocator_slack_bytes: int  # reserved beyond that
    reserved_bytes: int  # the sum of both: what PyTorch takes from the device
    outside_allocator_bytes: int  # CUDA context and communication
    capacity_bytes: int  # what a process may take
    margin_bytes: int  # `hardware.memory_margin_gib`
    host_bytes: int  # of a node's processes together, at the peak
    host_capacity_bytes: int | None  # what they may take; None if it is not known
    disk_bytes: dict[str, int]  # by artifact
    disk_free_bytes: int | None  # none where there was no disk to ask
    time: Estimate  # predicted time and cost
    candidates: list[TriedPlan]  # the plans that were tried
    model: dict[str, Any]
    """Facts of the model's shape (`ModelShape`), and its numbers of parameters."""


class Preflight(Forecast):
    """`preflight_run/preflight.json`: a forecast with what made it."""

    advice: ClassVar[str] = (
        "Another version of the workflow may have written it: delete this file and run "
        "`snakemake --cores all preflight` again."
    )

    provenance: Provenance  # what made the file
