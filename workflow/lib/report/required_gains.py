"""Least gains that a run must reach (`evaluate.require`), compared with its evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from workflow.lib.artifacts.evaluation_record import Evaluation, GainVerdict
from workflow.lib.artifacts.records import Interval
from workflow.lib.report.verdict import Measured
from workflow.lib.settings.evaluate import HELDOUT_LOSS, REWARDS, EvaluateConfig
from workflow.lib.settings.subjects import SUBJECT_LABELS
from workflow.lib.system.errors import UserError, setting_error

RequireBy = Literal["estimate", "interval"]


@dataclass(frozen=True)
class Gate:
    """Reached gains of `evaluate.require`, if any; `problem`: why it cannot be judged."""

    verdicts: list[GainVerdict]
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether `require_gain` lets the run through."""
        return self.problem is None and all(verdict.met for verdict in self.verdicts)


def gate(settings: EvaluateConfig, measured: Measured) -> Gate:
    """Return the judgement of a run for the report, with the reason if there can be none."""
    try:
        return Gate(verdicts(settings.require, measured, by=settings.require_by))
    except UserError as error:
        return Gate([], problem=str(error))


def verdicts(
    require: Mapping[str, float], measured: Measured, *, by: RequireBy
) -> list[GainVerdict]:
    """Return the verdict on each requirement; a gain is positive where the served model is better,
    and rewards are judged as they are. by: `estimate`, or `interval` (its lower end of 95%). Raises
    `UserError` for a metric that is not measured, or without direction or interval."""
    return [_verdict(name, least, measured, by=by) for name, least in require.items()]


def _verdict(name: str, least: float, measured: Measured, *, by: RequireBy) -> GainVerdict:
    reference: Evaluation | None
    if name == HELDOUT_LOSS:
        reference, (gain, ci95) = measured.reference, _loss_gain(measured)
    elif name in REWARDS:
        reference, (gain, ci95) = None, _reward(name, measured.served)
    else:
        reference = measured.task_reference
        gain, ci95 = _metric_gain(name, measured.served, reference)
    if by == "interval" and ci95 is None:
        raise setting_error(
            "evaluate.require_by", by, f"{name} has no interval", "Set estimate, or remove it"
        )
    judged = ci95[0] if by == "interval" and ci95 is not None else gain
    return GainVerdict(
        requirement=name,
        least=least,
        subject=measured.served.subject,
        reference=None if reference is None else reference.subject,
        gain=gain,
        gain_ci95=ci95,
        judged_by=by,
        met=judged >= least,
    )


def _loss_gain(measured: Measured) -> tuple[float, Interval | None]:
    comparison = measured.comparison
    assert comparison.loss_difference is not None, "the settings require it to be measured"
    return comparison.loss_difference, comparison.loss_difference_ci95


def _reward(name: str, served: Evaluation) -> tuple[float, Interval | None]:
    rewards = served.rewards
    assert rewards is not None, "the settings require it to be measured"
    if name == "reward_accuracy":
        return rewards.accuracy, rewards.accuracy_ci95
    return rewards.margin, rewards.margin_ci95


def _metric_gain(
    name: str, served: Evaluation, reference: Evaluation
) -> tuple[float, Interval | None]:
    known = {
        f"{task}/{metric}": (paired, served.tasks[task].metrics[metric].higher_is_better)
        for task, metrics in served.comparisons[reference.subject].tasks.items()
        for metric, paired in metrics.items()
    }
    if name not in known:
        raise setting_error(
            "evaluate.require", name, "it is not measured", f"Known: {', '.join(known) or 'none'}"
        )
    paired, higher = known[name]
    if higher is None:
        raise setting_error(
            "evaluate.require",
            name,
            "its task does not say whether more is better (higher_is_better)",
            "Say it in the task's file, or remove the requirement",
        )
    if higher or paired.difference_ci95 is None:
        return (paired.difference if higher else -paired.difference), paired.difference_ci95
    low, high = paired.difference_ci95
    return -paired.difference, (-high, -low)


def refuse_unmet(by_run: Mapping[str, list[GainVerdict]]) -> None:
    """Raise `UserError` naming every requirement that a run missed."""
    lines = [
        f"{run}: {verdict.requirement} {_spelled(verdict)}, required {verdict.least:+.4g}"
        for run, verdicts_of_run in by_run.items()
        for verdict in verdicts_of_run
        if not verdict.met
    ]
    if lines:
        raise UserError(
            "evaluate.require is not met. "
            + "; ".join(lines)
            + ". Everything is made and kept; train otherwise, or lower the requirement."
        )


def _spelled(verdict: GainVerdict) -> str:
    amount = f"{'gained' if verdict.reference else 'is'} {verdict.gain:+.4g}"
    if verdict.judged_by == "interval" and verdict.gain_ci95 is not None:
        low, high = verdict.gain_ci95
        amount += f" (95% interval {low:+.4g} to {high:+.4g}, whose lower end counts)"
    return amount + (f" over the {SUBJECT_LABELS[verdict.reference]}" if verdict.reference else "")
