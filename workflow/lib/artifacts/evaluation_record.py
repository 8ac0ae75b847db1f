"""Records of `evaluate_run` (`<subject>.json`, `items.json`) and of `require_gain`
(`requirements.json`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field

from workflow.lib.artifacts.records import Interval, Provenance, Record
from workflow.lib.settings.forms import FORMS, REFERENCES, SubjectName
from workflow.lib.system.number_formats import signed

ITEMS = "items.json"


class SourceLoss(Record):
    """Loss on some documents."""

    loss: float  # nats per trained token, each by its weight in the loss
    loss_ci95: Interval | None  # 95% interval over documents; null for a single document
    perplexity: float  # exponential of the loss without weights
    documents: int  # documents measured
    trained_tokens: int  # their prediction targets


class DocumentLoss(Record):
    document: int  # its number in the tokens folder, or of other texts in their order
    source: str  # name of its source
    loss_sum: float  # Nats, summed over its prediction targets
    tokens: int  # its prediction targets
    weighted_sum: float | None = None
    """The same sum, each target times its weight; of data with weights alone."""
    weight: float | None = None  # sum of these weights

    @property
    def loss(self) -> tuple[float, float]:
        """Sum and size of its share of the loss."""
        if self.weighted_sum is None or self.weight is None:
            return self.loss_sum, self.tokens
        return self.weighted_sum, self.weight


class TextLoss(SourceLoss):
    """Loss on held-out documents, or on other texts, whose sources are their kinds."""

    loss_ci95: Interval  # 95% interval over documents
    of: str = "documents"
    """The kind of documents: of pairs `chosen answers`, of rated answers `good answers`."""
    sources: dict[str, SourceLoss]  # the same by source
    per_document: list[DocumentLoss]  # loss of each document


class Metric(Record):
    value: float  # the score
    stderr: float | None  # its standard error; null where the harness gives none
    higher_is_better: bool | None  # which direction is better; null if the task does not say


class Task(Record):
    metrics: dict[str, Metric]  # scores by metric
    items: int  # items of the task
    version: int | float | str | None  # version of the task


class Sample(Record):
    """A held-out prompt with the answer of one subject."""

    document: int  # number of the held-out document
    prompt: str  # text before its first trained token
    reference: str  # its first run of trained tokens
    answer: str  # the greedy answer


class MetricDifference(Record):
    difference: float  # second subject - first
    difference_ci95: Interval | None
    """95% interval over the items; null for a metric that is no mean over items, or of fewer than
    6 items that are not right or wrong."""
    p_value: float | None  # two-sided, of no difference; null for a metric that is no mean
    test: str | None  # test of the p-value: `exact McNemar` or `sign flips`
    gained: int | None
    """Items that only the second subject answered rightly; null where values are not 0 and 1."""
    lost: int | None  # items that only the first subject answered rightly; null as `gained`


class LossDifference(Record):
    """Paired difference of the held-out loss, first subject - second: positive is better."""

    loss_difference: float | None  # nats per trained token; null if nothing was measured
    loss_difference_ci95: Interval | None  # 95% interval over documents; null for fewer than 6
    p_value: float | None  # two-sided, of no difference; null as the difference
    documents: int  # documents compared


class TextDifference(LossDifference):
    sources: dict[str, LossDifference]  # loss differences by source


class ObjectiveLoss(TextDifference):
    """Loss of an example by the run's objective, as training measures it on held-out data;
    differences: `against` - subject."""

    of: str  # `pairs`, `rated answers` or `documents`
    against: str
    """`reference`, the model of log p_ref, or without one the first measured subject; of a
    teacher's student the NF4 base, as the original may be the teacher."""
    loss: float  # mean loss of an example, of documents that of a trained token
    loss_ci95: Interval | None  # 95% interval over examples
    sources: dict[str, LossDifference] = Field(default={})  # loss differences by source
    per_example: list[tuple[float, float]] = Field(
        default=[]
    )  # summed loss and size of each example


class RewardDifference(Record):
    """Paired difference of two subjects' preferences, second - first."""

    accuracy: float  # of the share of examples that are right
    accuracy_ci95: Interval | None  # 95% interval over examples
    margin: float  # of the mean margin
    margin_ci95: Interval | None  # 95% interval over examples; null for fewer than 6


class Rewards(Record):
    """A subject's preferences on held-out examples, by the reward of the run's objective."""

    of: str  # `pairs` or `rated answers`
    examples: int  # examples measured
    accuracy: float
    """Share of right examples: the chosen answer has the higher reward; a rated answer's reward
    lies on its side of KTO's reference point."""
    accuracy_ci95: Interval | None  # 95% interval over examples
    margin: float
    """Mean margin: reward of the chosen answer - of the rejected one; of a rated answer its reward
    - the reference point, with the sign of its rating."""
    margin_ci95: Interval | None  # 95% interval over examples; null for fewer than 6
    margins: list[float]  # of each example; it is right above 0
    chosen_log_ratio: float | None = None
    """Mean of log p - log p_ref over the tokens of chosen (good) answers, nats. It replaces the KL
    divergence to the reference, but is of given answers and not of the model's own: it may be
    negative. Null without a reference."""
    chosen_log_ratio_ci95: Interval | None = None  # as of the margin
    rejected_log_ratio: float | None = None  # the same of rejected (bad) answers
    rejected_log_ratio_ci95: Interval | None = None  # as of the margin


class Comparison(TextDifference):
    """Paired comparison of two subjects on the same questions."""

    tasks: dict[str, dict[str, MetricDifference]]  # differences by task and metric
    rewards: RewardDifference | None = None  # of preferences, where both subjects have rewards
    other_texts: TextDifference | None = None  # of texts of other kinds than the training data


class FourBits(Record):
    """The cost of 4 bits, by the base's calibration: nats per predicted held-out token."""

    documents: int  # documents measured
    original: float  # loss of the model before quantization
    absmax: LossDifference
    """The loss of bitsandbytes' codes and scales, against the original."""
    calibrated: LossDifference  # the base's loss against the original
    won_back: LossDifference  # gain of calibration: the difference of the two


class Evaluation(Record):
    """`evaluate_run/<subject>.json`."""

    subject: SubjectName  # the measured model
    run: str  # name of the run
    served: bool  # whether it is the served model (`evaluate.served`)
    heldout: TextLoss | None  # held-out loss; null if it is switched off
    tasks: dict[str, Task]  # scores by task
    samples: list[Sample]  # answers to some held-out prompts
    other_texts: TextLoss | None = None
    """Loss on texts of other kinds than the training data; null if `evaluate.forgetting` is off."""
    rewards: Rewards | None = None
    """Its preferences, of runs that train them; with a reference model, of subjects with the
    trained adapter alone."""
    objective: ObjectiveLoss | None = None
    """Of runs whose objective's loss is not the held-out loss: its loss of an example."""
    comparisons: dict[SubjectName, Comparison]
    """With each measured subject before it, which comes first in the difference."""
    four_bits: FourBits | None = None  # of the base, if it was calibrated
    quantized_by: str | None = None
    """Of the base: its method, with `quantize.method: auto` the reason too."""
    provenance: Provenance  # origin of the file


class TaskItems(Record):
    """A metric of a task, item by item."""

    task: str  # name of the task
    metric: str  # name of the metric, which is the mean of the values
    values: list[tuple[int, str, str, float]]
    """Number of the item, hashes of its document and of its prompt, value."""


class SubjectItems(Record):
    """The answers of one subject."""

    losses: list[DocumentLoss]  # on each held-out document; none if that is switched off
    tasks: list[TaskItems]  # without corpus-level metrics and groups


class TaskOverlap(NamedTuple):
    """Items of a task, and how many have at least so much of their tokens in training rows."""

    items: int
    too_short: int  # to judge
    a_fifth: int
    four_fifths: int


class Items(Record):
    """`evaluate_run/items.json`: the data of the statistics, without texts."""

    run: str  # name of the run
    served: SubjectName  # the served model
    subjects: dict[SubjectName, SubjectItems]  # in display order
    overlap: dict[str, list[float | None]]
    """By task, of each item: the share of its tokens in runs of 11 of training rows; null for items
    without a text of that length."""
    provenance: Provenance  # origin of the file

    @property
    def overlap_counts(self) -> dict[str, TaskOverlap]:
        """The number of a task's items in training rows, by task; shares as in `task_scores`'s
        source (Llama 2: not clean, dirty)."""
        return {
            task: TaskOverlap(
                len(shares),
                shares.count(None),
                *(sum((share or 0) >= least for share in shares) for least in (0.2, 0.8)),
            )
            for task, shares in self.overlap.items()
        }


@dataclass(frozen=True)
class FourBitsCost:
    """The cost of quantization: loss of the NF4 base - loss of the original."""

    nats: float  # per trained token, or per predicted one if the calibration measured it
    ci95: Interval | None
    p_value: float | None
    documents: int
    measured_by: Literal["evaluation", "calibration"]


def four_bits_cost(subjects: Mapping[SubjectName, Evaluation]) -> FourBitsCost | None:
    """Return the cost of 4 bits, by the evaluation or else the base's calibration, or None."""
    if (base := subjects.get("base")) is None:
        return None
    comparison = base.comparisons.get("original")
    if comparison is not None and (gain := comparison.loss_difference) is not None:
        ends = comparison.loss_difference_ci95
        ci95 = None if ends is None else (-ends[1], -ends[0])
        return FourBitsCost(-gain, ci95, comparison.p_value, comparison.documents, "evaluation")
    paid = None if base.four_bits is None else base.four_bits.calibrated
    if paid is None or (nats := paid.loss_difference) is None:
        return None
    ends, p_value = paid.loss_difference_ci95, paid.p_value
    return FourBitsCost(nats, ends, p_value, paid.documents, "calibration")


FORGETTING_BOUND = 0.05
"""Nats per token. A rise of the loss on other texts is a warning from here on: it multiplies the
perplexity by 1.05, and is what NF4 costs a small model (0.04 to 0.05 in `docs/results.md`), so the
training took about as much from other texts as the quantization did."""


@dataclass(frozen=True)
class Forgetting:
    """The cost of training at texts of other kinds: loss of the served model - loss of the
    reference."""

    reference: SubjectName
    served: SubjectName
    difference: TextDifference  # loss of the reference - loss of the served model

    @property
    def nats(self) -> float:
        assert self.difference.loss_difference is not None, "both subjects have a loss"
        return -self.difference.loss_difference

    @property
    def ci95(self) -> Interval | None:
        ends = self.difference.loss_difference_ci95
        return None if ends is None else (-ends[1], -ends[0])

    @property
    def is_worse(self) -> bool:
        """Whether it is a warning: at least `FORGETTING_BOUND`, and the interval excludes 0."""
        return self.nats >= FORGETTING_BOUND and self.ci95 is not None and self.ci95[0] > 0

    def __str__(self) -> str:
        served, reference = FORMS[self.served].label, FORMS[self.reference].label
        within = "" if self.ci95 is None else " [{}, {}]".format(*map(signed, self.ci95))
        change = f"{signed(self.nats)}{within} nats per token against the {reference}"
        if self.is_worse:
            return f"The {served} model got worse at texts of other kinds: {change}"
        return f"loss of the {served} model at texts of other kinds: {change}"


def forgetting(subjects: Mapping[SubjectName, Evaluation]) -> Forgetting | None:
    """Return what the served model forgot against the first measured of `REFERENCES`, or None."""
    for served in (evaluation for evaluation in subjects.values() if evaluation.served):
        for name in (name for name in REFERENCES if name in served.comparisons):
            if (paired := served.comparisons[name].other_texts) is not None:
                return Forgetting(name, served.subject, paired)
    return None


class GainVerdict(Record):
    """A least gain of `evaluate.require`, and the measured one."""

    requirement: str
    """`heldout_loss`, `other_text_loss`, `reward_accuracy`, `reward_margin`, or task/metric."""
    least: float  # the required gain; of rewards the value
    subject: SubjectName  # the served model
    reference: str | None
    """The compared model, by its name for people: the original, or the NF4 base if that was not
    measured, or of an objective's own loss that of `ObjectiveLoss`; null for rewards."""
    gain: float  # the gain over the reference, positive is better; of rewards the value
    gain_ci95: Interval | None  # its 95% interval; null if there is none
    judged_by: Literal["estimate", "interval"]
    """Whether the gain itself decides, or the lower end of its interval."""
    met: bool  # whether it is reached


class Requirements(Record):
    """`results/requirements.json`."""

    runs: dict[str, list[GainVerdict]]  # by run, each least gain
    provenance: Provenance  # origin of the file
