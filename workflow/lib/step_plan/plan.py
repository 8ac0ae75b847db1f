"""`StepPlan`: the one description of how a step of training runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import TypeAdapter

from workflow.lib.model.architecture.layer_choice import is_recomputed, recomputed_share
from workflow.lib.step_plan.memory_options import MemoryOptions


@dataclass(frozen=True, kw_only=True)
class StepPlan(MemoryOptions):
    """How a step runs: all that the engine, its memory and its time depend on besides the model."""

    gpu_memory_bytes: int | None = None
    """Bound on what PyTorch reserves on each GPU; null: no bound."""
    num_steps: int = 0
    """Optimizer steps of the run; 0 while plans are compared."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Return the plan of a JSON document, which may lack what has a default."""
        return TypeAdapter(cls).validate_python(dict(document), strict=False)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return the plan with other values of some fields, by name."""
        return replace(self, **values)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients lie there throughout: those of earlier micro-batches, or those that a
        graph adds to.
        """
        return self.accumulates or self.graphed

    def recomputes(self, layer: int) -> bool:
        """Whether backward recomputes decoder layer `layer`
        (`recomputation.checkpoint_activations_`).
        """
        return is_recomputed(self.activation_checkpointing, layer)

    def recomputed_among(self, layers: Sequence[int]) -> int:
        """How many of these layers backward recomputes."""
        return sum(map(self.recomputes, layers))

    def recomputed_layers(self, num_layers: int) -> int:
        """How many of the first `num_layers` layers backward recomputes."""
        return math.ceil(num_layers * recomputed_share(self.activation_checkpointing))
