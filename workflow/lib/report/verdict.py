"""The verdict of a run's evaluations on the served model, shared by report, model card and required
gains (`evaluate.require`).

Gains are the served model's over the reference: the original model, or the NF4 base if the original
was not measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workflow.lib.artifacts.evaluation_record import (
    ITEMS,
    Comparison,
    Evaluation,
    Forgetting,
    FourBitsCost,
    GainVerdict,
    Items,
    LossDifference,
    Metric,
    MetricDifference,
    TaskOverlap,
    TextDifference,
    forgetting,
    four_bits_cost,
)
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Interval
from workflow.lib.evaluation.intervals import FEWEST, Estimate
from workflow.lib.settings.evaluate import OTHER_TEXT_LOSS, REWARD, REWARDS, EvaluateConfig, is_loss
from workflow.lib.settings.forms import FORMS, REFERENCES, SUBJECTS, SubjectName
from workflow.lib.system.checksums import damaged
from workflow.lib.system.errors import UserError, setting_error

Outcome = Literal["improved", "worsened", "unclear", "too few", "not measured"]


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task: reference, served model, and paired difference."""

    task: str
    metric: str
    items: int
    before: Metric
    after: Metric
    difference: MetricDifference

    @property
    def change(self) -> str:
        """The paired interval's verdict on the served model: `better`, `worse` or `without a clear
        change`; `of too few items`; `not judged` without interval or direction."""
        ends, upwards = self.difference.difference_ci95, self.after.higher_is_better
        if self.items < FEWEST:
            return "of too few items"
        if ends is None or upwards is None:
            return "not judged"
        low, high = ends if upwards else (-ends[1], -ends[0])
        return "better" if low > 0 else "worse" if high < 0 else "without a clear change"


@dataclass(frozen=True)
class Measured:
    """The evaluations of a run, by subject, in display order."""

    subjects: Mapping[SubjectName, Evaluation]
    overlap: Mapping[str, TaskOverlap]
    """Items of tasks in training rows, by task."""
    reward_gain: Estimate | None = None
    """Of held-out prompts since the first round of sampled answers; None without rounds."""

    @property
    def served(self) -> Evaluation:
        return next(each for each in self.subjects.values() if each.served)

    @property
    def start(self) -> Evaluation | None:
        """The adapter of the run that the training started from; None without one."""
        return self.subjects.get("start")

    @property
    def reference(self) -> Evaluation:
        """The model that held-out losses are compared with: the original, or the NF4 base."""
        return self._reference(lambda evaluation: evaluation.heldout is not None)

    @property
    def task_reference(self) -> Evaluation:
        """The reference of tasks; an original larger than memory has no scores."""
        return self._reference(lambda evaluation: bool(evaluation.tasks))

    @property
    def sample_reference(self) -> Evaluation:
        """The model whose answers are shown beside the served model's."""
        return self._reference(lambda evaluation: bool(evaluation.samples))

    def _reference(self, has_it: Callable[[Evaluation], bool]) -> Evaluation:
        references = [self.subjects[name] for name in REFERENCES if name in self.subjects]
        return next((evaluation for evaluation in references if has_it(evaluation)), references[0])

    @property
    def comparison(self) -> Comparison:
        """Paired comparison of the served model with the reference."""
        return self.served.comparisons[self.reference.subject]

    @property
    def outcome(self) -> Outcome:
        """The interval's verdict on the decisive difference."""
        return _outcome(self.decisive.loss_difference_ci95, self.units)

    @property
    def decisive(self) -> TextDifference:
        """The gain that verdict, required `heldout_loss` and the comparison of runs are about: of
        an example's loss by the run's objective (as `train.select` and early stopping), which is
        its own or the held-out loss."""
        return self.served.objective or self.comparison

    @property
    def units(self) -> int:
        """The documents or examples that decide the outcome."""
        return self.decisive.documents

    @property
    def loss_outcome(self) -> Outcome:
        """The interval's verdict on the held-out loss; `unclear`: it contains 0; `too few`:
        no difference of so few documents is significant."""
        compared = self.comparison
        return _outcome(compared.loss_difference_ci95, compared.documents)

    @property
    def scores(self) -> list[TaskScore]:
        """Each metric of each task, of the reference and the served model."""
        before, after = self.task_reference, self.served
        differences = after.comparisons[before.subject].tasks
        return [
            TaskScore(
                task=task,
                metric=metric,
                items=result.items,
                before=before.tasks[task].metrics[metric],
                after=value,
                difference=differences[task][metric],
            )
            for task, result in after.tasks.items()
            for metric, value in result.metrics.items()
            if task in before.tasks
        ]

    @property
    def four_bits_cost(self) -> FourBitsCost | None:
        return four_bits_cost(self.subjects)

    @property
    def forgetting(self) -> Forgetting | None:
        return forgetting(self.subjects)


def _outcome(gain: Interval | None, units: int) -> Outcome:
    if 0 < units < FEWEST:
        return "too few"
    if gain is None:
        return "not measured"
    return "improved" if gain[0] > 0 else "worsened" if gain[1] < 0 else "unclear"


def label(evaluation: Evaluation) -> str:
    return FORMS[evaluation.subject].label


def read_measured(folder: Path, *, run: str, reward_gain: Estimate | None = None) -> Measured:
    """Read the evaluations in a folder of `evaluate_run`. Raises `UserError` if one is damaged,
    another run's or of other questions, and unless one is of the served model and one a
    reference."""
    files = {name: folder / f"{name}.json" for name in SUBJECTS}
    evaluations = {
        name: read_record(path, Evaluation) for name, path in files.items() if path.is_file()
    }
    served = [name for name, evaluation in evaluations.items() if evaluation.served]
    if len(served) != 1 or not set(REFERENCES) & evaluations.keys():
        raise UserError(
            f"{folder}: of the evaluations there ({', '.join(evaluations) or 'none'}) "
            f"{len(served)} are of what is served, which must be one; and one of "
            f"{', '.join(REFERENCES)} must be measured. Delete the folder {folder} and repeat the "
            "command; it is made again."
        )
    for name, evaluation in evaluations.items():
        refuse_mismatch(files[name], "run", evaluation.run, "its folder", run)
        refuse_mismatch(files[name], "subject", evaluation.subject, "its file name", name)
        if lost := evaluation.comparisons.keys() - evaluations.keys():
            finding = f"is not there, and {files[name].name} compares with it"
            raise damaged(folder, f"{min(lost)}.json", finding)
    overlap = read_record(folder / ITEMS, Items).overlap_counts
    measured = Measured(evaluations, overlap, reward_gain)
    _check_questions(measured, files)
    return measured


def _check_questions(measured: Measured, files: Mapping[SubjectName, Path]) -> None:
    served = measured.served
    path = files[served.subject]
    for field, other, value in (
        ("samples.document", measured.sample_reference, lambda x: [s.document for s in x.samples]),
        ("tasks", measured.task_reference, _metric_names),
        ("heldout.documents", measured.reference, _documents),
        ("other_texts.documents", measured.reference, _other_texts),
    ):
        refuse_mismatch(path, field, value(served), str(files[other.subject]), value(other))
    reference = measured.task_reference
    compared = {
        task: sorted(metrics)
        for task, metrics in served.comparisons[reference.subject].tasks.items()
    }
    refuse_mismatch(path, "comparisons.tasks", compared, "tasks", _metric_names(served))


def _metric_names(evaluation: Evaluation) -> dict[str, list[str]]:
    return {task: sorted(result.metrics) for task, result in evaluation.tasks.items()}


def _documents(evaluation: Evaluation) -> int | None:
    return None if evaluation.heldout is None else evaluation.heldout.documents


def _other_texts(evaluation: Evaluation) -> int | None:
    return None if evaluation.other_texts is None else evaluation.other_texts.documents


def refuse_mismatch(path: Path, field: str, value: object, other: str, expected: object) -> None:
    """Raise `UserError` unless a field of `path` agrees with another file."""
    if value != expected:
        raise UserError(
            f"{path}: {field} = {value!r} does not agree with {other} = {expected!r}. "
            "The files are of different runs; run the stage that writes them again."
        )


RequireBy = Literal["estimate", "interval"]


@dataclass(frozen=True)
class Gate:
    """Measured gains of `evaluate.require`, if any; problem: why they cannot be judged."""

    verdicts: list[GainVerdict]
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None and all(verdict.met for verdict in self.verdicts)


def gate(settings: EvaluateConfig, measured: Measured) -> Gate:
    """Return the verdict on `evaluate.require`; a requirement that cannot be judged is its
    problem."""
    try:
        return Gate(verdicts(settings.require, measured, by=settings.require_by))
    except UserError as error:
        return Gate([], problem=str(error))


def verdicts(
    require: Mapping[str, float], measured: Measured, *, by: RequireBy
) -> list[GainVerdict]:
    """Return the verdict on each requirement. A gain is positive if the served model is better;
    rewards are judged by their value. by: `estimate`, or `interval` (its lower end of 95%). Raises
    `UserError` for a metric that is not measured, or without direction or interval."""
    return [_verdict(name, least, measured, by=by) for name, least in require.items()]


def _verdict(name: str, least: float, measured: Measured, *, by: RequireBy) -> GainVerdict:
    reference: str | None
    if is_loss(name):
        objective = measured.served.objective
        reference = label(measured.reference) if objective is None else objective.against
        gain, ci95 = _loss_gain(measured.decisive, name.partition("/")[2])
    elif name == OTHER_TEXT_LOSS:
        forgot = measured.forgetting
        assert forgot is not None, "the settings require it to be measured"
        reference = FORMS[forgot.reference].label
        gain, ci95 = _loss_gain(forgot.difference, "")
    elif name == REWARD:
        reference = "first round"
        if measured.reward_gain is None:
            reason = "its held-out prompts have no rewards"
            raise setting_error("evaluate.require", name, reason, "Mend the reward functions")
        gain, ci95 = measured.reward_gain.value, measured.reward_gain.ci95
    elif name in REWARDS:
        reference, (gain, ci95) = None, _reward(name, measured.served)
    else:
        reference = label(measured.task_reference)
        gain, ci95 = _metric_gain(name, measured.served, measured.task_reference)
    if by == "interval" and ci95 is None:
        raise setting_error(
            "evaluate.require_by",
            by,
            f"{name} has no interval: it is of fewer than {FEWEST} units, or no mean over items",
            "Measure more of them, set estimate, or remove the requirement",
        )
    judged = ci95[0] if by == "interval" and ci95 is not None else gain
    return GainVerdict(
        requirement=name,
        least=least,
        subject=measured.served.subject,
        reference=reference,
        gain=gain,
        gain_ci95=ci95,
        judged_by=by,
        met=judged >= least,
    )


def _loss_gain(compared: TextDifference, source: str) -> tuple[float, Interval | None]:
    paired: LossDifference = compared
    if source:
        if source not in compared.sources:
            sources = f"Held-out documents are of {', '.join(compared.sources)}"
            raise setting_error("evaluate.require", source, "it has no held-out document", sources)
        paired = compared.sources[source]
    assert paired.loss_difference is not None, "the settings require it to be measured"
    return paired.loss_difference, paired.loss_difference_ci95


def _reward(name: str, served: Evaluation) -> tuple[float, Interval | None]:
    rewards = served.rewards
    assert rewards is not None, "the settings require it to be measured"
    if name == "reward_accuracy":
        return rewards.accuracy, rewards.accuracy_ci95
    return rewards.margin, rewards.margin_ci95


def _metric_gain(
    name: str, served: Evaluation, reference: Evaluation
) -> tuple[float, Interval | None]:
    measured = {
        f"{task}/{metric}": (paired, served.tasks[task].metrics[metric].higher_is_better)
        for task, metrics in served.comparisons[reference.subject].tasks.items()
        for metric, paired in metrics.items()
    }
    if name not in measured:
        raise setting_error(
            "evaluate.require",
            name,
            "it is not measured",
            f"Known: {', '.join(measured) or 'none'}",
        )
    paired, higher = measured[name]
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
    return amount + (f" over the {verdict.reference}" if verdict.reference else "")
