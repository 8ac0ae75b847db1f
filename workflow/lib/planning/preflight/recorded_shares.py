"""What recordings of some plans of a model tell about its other plans.

The closed form adds up what a plan should need; a recording counts what the engine asks for. Their
ratio is nearly the same for plans that differ in rows, or in how many layers wait on the host. Of
mixtures and new kinds of layers the closed form is an upper bound, up to 15% too high.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from workflow.lib.step_plan.plan import StepPlan


@dataclass(frozen=True)
class RecordedShares:
    """Recorded peaks as shares of the closed form's, by kind of plan."""

    of_kinds: Mapping[Hashable, float] = field(default_factory=dict)

    def corrected(self, peak_bytes: int, plan: StepPlan) -> int:
        """Return what a plan is expected to allocate, for its peak by the closed form: by the last
        recording of its kind; without one, by the smallest share of any kind, or as it is.
        """
        unknown = min(1.0, *self.of_kinds.values()) if self.of_kinds else 1.0
        return int(peak_bytes * self.of_kinds.get(_kind(plan), unknown))

    def with_recorded(self, plan: StepPlan, share: float) -> "RecordedShares":
        """Return these and the share of a plan that was recorded."""
        return RecordedShares({**self.of_kinds, _kind(plan): share})


def _kind(plan: StepPlan) -> Hashable:
    return (
        plan.activation_checkpointing,
        plan.offload_activations,
        plan.reshard_after_forward,
        plan.offload_layers > 0,
    )
