"""`StepPlan`: the one description of how a step of training runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import TypeAdapter

from workflow.lib.step_plan.memory_options import MemoryOptions


@dataclass(frozen=True, kw_only=True)
class StepPlan(MemoryOptions):
    """How a step runs: all that the engine, its memory and its time depend on besides the model."""

    gpu_memory_bytes: int | None = None
    """Bound on what PyTorch reserves on each GPU; null: no bound."""
    num_steps: int = 0  # optimizer steps of the run; 0 while plans are compared

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Return the plan of a JSON document; fields with a default may be missing."""
        return TypeAdapter(cls).validate_python(document, strict=False)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return the plan with other values of some fields, by name."""
        return replace(self, **values)
