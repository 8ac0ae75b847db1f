"""From a decision to the content of `preflight.json`: the plan, the peak's terms, the time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workflow.lib.artifacts.preflight_record import Forecast, Term, TriedPlan
from workflow.lib.planning.memory.peaks import EXPLANATIONS
from workflow.lib.planning.model_sizes import offload_window, trainable_parameters
from workflow.lib.planning.preflight.decision import Decision
from workflow.lib.planning.preflight.plan_search import VERDICTS_OF_CHOSEN, Candidate, explain
from workflow.lib.planning.preflight.planned_run import PlannedRun
from workflow.lib.planning.timing import step_time
from workflow.lib.settings.schedule import total_steps
from workflow.lib.step_plan.memory_options import TABLE, in_words
from workflow.lib.step_plan.plan import StepPlan


def forecast(decision: Decision, planned: PlannedRun) -> Forecast:
    """Return the content of `preflight.json`, without its provenance."""
    chosen, limits, shape = decision.chosen, decision.limits, planned.shape
    peaks, replayed = chosen.peaks, chosen.replayed
    plan = _followed_plan(decision, planned)
    peak_bytes = peaks.allocated_bytes
    slack_bytes = (
        replayed.reserved_bytes - peak_bytes if replayed else limits.slack_bytes(peak_bytes)
    )
    parts, spread = _seconds(decision, planned)
    return Forecast(
        verdict="fits" if decision.fits else "does_not_fit",
        reason=decision.reason,
        plan=plan,
        method="replay" if replayed else "lines",
        terms=[
            Term(name=name, bytes=size, explanation=EXPLANATIONS[name])
            for name, size in peaks.terms.items()
        ],
        phases=peaks.phase_bytes,
        peak_phase=peaks.peak_phase,
        peak_bytes=peak_bytes,
        allocator_slack_bytes=slack_bytes,
        reserved_bytes=peak_bytes + slack_bytes,
        outside_allocator_bytes=limits.outside_allocator_bytes,
        capacity_bytes=limits.capacity_bytes,
        margin_bytes=limits.margin_bytes,
        host_bytes=chosen.host_bytes,
        host_capacity_bytes=limits.host_capacity_bytes,
        disk_bytes=decision.disk_bytes,
        disk_free_bytes=decision.disk_free_bytes,
        time=step_time.estimate(
            parts,
            spread=spread,
            basis=decision.speed.basis,
            num_gpus=len(planned.machine.gpu_names),
            tokens=chosen.plan.tokens,
            accumulation_steps=plan.accumulation_steps,
            num_steps=plan.num_steps,
            price_per_gpu_hour=planned.settings.hardware.price_per_gpu_hour,
        ),
        candidates=[_tried_plan(candidate, chosen) for candidate in decision.candidates],
        bits=decision.bits,
        model=shape.document()
        | {
            "total_parameters": shape.quantized_weights + shape.plain_weights,
            "quantized_parameters": shape.quantized_weights,
            "trainable_parameters": trainable_parameters(shape, chosen.plan),
        },
    )


def _seconds(
    decision: Decision, planned: PlannedRun
) -> tuple[step_time.Parts | None, step_time.Spread | None]:
    """Seconds of a micro-batch by their use, and their range; None if the speed is unknown."""
    chosen = decision.chosen
    if not decision.speed.measured or not chosen.peaks.work.phases:
        return None, None
    step_facts: dict[str, Any] = {
        "work": chosen.peaks.work,
        "plan": chosen.plan,
        "num_layers": planned.shape.num_layers,
        "trained_share": planned.tokens.trained_share,
        "micro_batches": decision.rows // chosen.plan.micro_batch_size,
    }
    return decision.speed.parts(**step_facts), decision.speed.spread(**step_facts)


def _followed_plan(decision: Decision, planned: PlannedRun) -> StepPlan:
    """Return the plan for `finetune`: the chosen one with values outside of the search."""
    plan, limits, settings = decision.chosen.plan, decision.limits, planned.settings
    enforced = planned.machine.device == "cuda" and settings.hardware.gpu_memory_gib != "auto"
    allowed = limits.capacity_bytes - limits.outside_allocator_bytes
    return replace(
        plan.without_forbidden(),
        offload_window_bytes=offload_window(planned.shape, plan),
        gpu_memory_bytes=allowed if enforced else None,
        num_steps=total_steps(settings.train, num_rows=planned.tokens.packed_rows),
    )


def _tried_plan(candidate: Candidate, chosen: Candidate) -> TriedPlan:
    searched = ["micro_batch_size", "accumulation_steps", "context_parallel"]
    searched += [option.field for option in TABLE if option.searched]
    return TriedPlan(
        choice={name: getattr(candidate.plan, name) for name in searched},
        host_bytes=candidate.host_bytes,
        peak_bytes=candidate.peak_bytes,
        # a plan that cannot be recorded has no time, and no other beside it
        relative_time=candidate.step_s / chosen.step_s if chosen.step_s else 1.0,
        fits=candidate.fits,
        why=explain(candidate, chosen),
    )


FASTER, SLOWER = 6, 3  # plans shown before and after the chosen one


def nearest_plans(plans: Sequence[TriedPlan]) -> list[TriedPlan]:
    """Return the chosen plan (of a run that does not fit, the one that needs least) between the
    next faster ones and the next slower ones that fit, by their time."""
    chosen = min(plans, key=lambda p: (p.why not in VERDICTS_OF_CHOSEN, abs(p.relative_time - 1)))
    ordered = sorted(plans, key=lambda plan: (plan.relative_time, plan.peak_bytes))
    index = ordered.index(chosen)
    slower = [plan for plan in ordered[index + 1 :] if plan.fits]
    return ordered[max(0, index - FASTER) : index + 1] + slower[:SLOWER]


def plan_choices(forecast: Forecast) -> list[str]:
    """Return the titles of `in_words` that differ among tried plans, and recomputation."""
    described = [
        in_words(tried.plan(forecast.plan), forecast.num_layers) for tried in forecast.candidates
    ]
    differ = {title for title in described[0] if len({words[title] for words in described}) > 1}
    return [title for title in described[0] if title in differ | {"recomputation"}]
