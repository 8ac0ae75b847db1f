"""The plans that preflight tried, as people see them: the chosen one among its neighbours."""

from collections.abc import Sequence

from workflow.lib.artifacts.preflight_record import TriedPlan
from workflow.lib.planning.preflight.plan_search import VERDICTS_OF_CHOSEN

FASTER, SLOWER = 6, 3  # plans shown on either side of the chosen one


def chosen_plan(plans: Sequence[TriedPlan]) -> TriedPlan:
    """Return the chosen plan; of a run that does not fit, the one that needs least."""
    return min(plans, key=lambda p: (p.why not in VERDICTS_OF_CHOSEN, abs(p.relative_time - 1)))


def nearest_plans(plans: Sequence[TriedPlan]) -> list[TriedPlan]:
    """Return the chosen plan between the next ones that would be faster and the next slower ones
    that fit, by their time.
    """
    ordered = sorted(plans, key=lambda plan: (plan.relative_time, plan.peak_bytes))
    index = ordered.index(chosen_plan(plans))
    slower = [plan for plan in ordered[index + 1 :] if plan.fits]
    return ordered[max(0, index - FASTER) : index + 1] + slower[:SLOWER]


def in_words(plan: TriedPlan) -> dict[str, str]:
    """Return what a plan has chosen besides the micro-batch, by title; `gathered`: weights, after
    forward.
    """
    layers = [f"{plan.offload_layers} layers"] if plan.offload_layers else []
    some = "" if plan.offload_activations is True else f" of {plan.offload_activations} layers"
    offloaded = [f"activations{some}"] * bool(plan.offload_activations) + layers
    return {
        "recomputation": plan.recomputation,
        "on the host": ", ".join(offloaded) or "nothing",
        "gathered": "freed" if plan.reshard_after_forward else "kept",
    }


def choices(plans: Sequence[TriedPlan]) -> list[str]:
    """Return the titles of `in_words` in which plans differ, and recomputation."""
    described = [in_words(plan) for plan in plans]
    differ = {title for title in described[0] if len({words[title] for words in described}) > 1}
    return [title for title in described[0] if title in differ | {"recomputation"}]
