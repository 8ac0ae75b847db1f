"""Scores of tasks, item by item, and the paired comparison of two subjects.

The bootstrap gives 95% percentile intervals of ratios of sums, and of paired differences (Efron and
Tibshirani 1993, ch. 13). Whole documents are resampled, as their tokens are not independent. Both
subjects see the same documents, so a difference resamples as one numerator.

If items are right or wrong, the p-value is of the exact McNemar test (McNemar 1947): binomial, over
items that only one of the two answered rightly. Otherwise: the bootstrap's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest  # type: ignore[import-untyped]

from workflow.lib.artifacts.evaluation_record import MetricDifference, Task
from workflow.lib.settings.config import EvaluateConfig

Floats = npt.NDArray[np.float64]
CHUNK_ENTRIES = 2**22  # resampled indices in memory at a time: 32 MiB
T = TypeVar("T")
Loss = tuple[float, int]  # summed over tokens, and their number


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums, its 95% interval, and the two-sided p-value of the ratio being 0; of a
    single unit the ratio alone."""

    value: float
    ci95: tuple[float, float] | None = None
    p_value: float | None = None


def draws_of(settings: EvaluateConfig) -> dict[str, int]:
    return {"resamples": settings.bootstrap_resamples, "seed": settings.seed}


def estimate_ratio(
    numerators: npt.ArrayLike, denominators: npt.ArrayLike, *, resamples: int, seed: int
) -> Estimate:
    """Estimate sum(numerators) / sum(denominators) over independent units, at least one, with
    positive denominators. p: twice the smaller share of resamples on a side of 0, counting the
    sample itself."""
    tops = np.asarray(numerators, dtype=np.float64)
    bottoms = np.asarray(denominators, dtype=np.float64)
    assert tops.shape == bottoms.shape, f"{tops.shape} against {bottoms.shape}"
    assert len(tops) >= 1, "nothing was measured"
    assert (bottoms > 0).all(), "denominators must be positive"
    value = float(tops.sum() / bottoms.sum())
    if len(tops) == 1:
        return Estimate(value)
    ratios = _resampled_ratios(tops, bottoms, resamples=resamples, seed=seed)
    low, high = (float(edge) for edge in np.quantile(ratios, [0.025, 0.975]))
    tail = min(int((ratios <= 0).sum()), int((ratios >= 0).sum()))
    return Estimate(value, (low, high), p_value=min(1.0, 2 * (tail + 1) / (resamples + 1)))


def _resampled_ratios(tops: Floats, bottoms: Floats, *, resamples: int, seed: int) -> Floats:
    generator = np.random.Generator(np.random.PCG64(seed))
    units = len(tops)
    at_once = max(1, CHUNK_ENTRIES // units)
    ratios = np.empty(resamples, dtype=np.float64)
    for first in range(0, resamples, at_once):
        count = min(at_once, resamples - first)
        drawn = generator.integers(0, units, size=(count, units))
        ratios[first : first + count] = tops[drawn].sum(axis=1) / bottoms[drawn].sum(axis=1)
    return ratios


Item = tuple[int, str, str]  # document number, hash of the document, hash of the prompt
MetricItems = dict[tuple[str, str], dict[Item, float]]


@dataclass(frozen=True)
class TaskScores:
    """Scores of one subject: the artifact's `tasks`, and by (task, metric) the `items` whose mean
    is the metric (none of corpus-level metrics and groups)."""

    scores: dict[str, Task]
    items: MetricItems

    def to_json(self) -> dict[str, Any]:
        items = [
            {"task": task, "metric": metric, "values": [(*item, v) for item, v in values.items()]}
            for (task, metric), values in self.items.items()
        ]
        scores = {name: task.as_json() for name, task in self.scores.items()}
        return {"scores": scores, "items": items}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "TaskScores":
        items = {
            (entry["task"], entry["metric"]): {
                (number, document, prompt): value
                for number, document, prompt, value in entry["values"]
            }
            for entry in stored["items"]
        }
        scores = {name: Task.model_validate(task) for name, task in stored["scores"].items()}
        return cls(scores=scores, items=items)

    def __or__(self, other: "TaskScores") -> "TaskScores":
        return TaskScores(scores=self.scores | other.scores, items=self.items | other.items)


NO_SCORES = TaskScores(scores={}, items={})


def task_differences(
    base: TaskScores, tuned: TaskScores, *, resamples: int, seed: int
) -> dict[str, dict[str, MetricDifference]]:
    """Return the paired differences, tuned - base, by task and metric, of the tasks of both."""
    differences: dict[str, dict[str, MetricDifference]] = {}
    for name, score in tuned.scores.items():
        if name not in base.scores:  # of a model that was streamed layer by layer
            continue
        before = base.scores[name].metrics
        differences[name] = {
            metric: MetricDifference(
                difference=score.metrics[metric].value - before[metric].value,
                **paired_fields(
                    base.items.get((name, metric), {}),
                    tuned.items.get((name, metric), {}),
                    resamples=resamples,
                    seed=seed,
                ),
            )
            for metric in score.metrics
            if metric in before
        }
    return differences


def paired_fields(
    base: dict[Item, float], tuned: dict[Item, float], *, resamples: int, seed: int
) -> dict[str, Any]:
    """Return the fields of `MetricDifference` that follow from the items."""
    assert base.keys() == tuned.keys(), "base and tuned did not answer the same items"
    keys = ("difference_ci95", "p_value", "test", "gained", "lost")
    fields: dict[str, Any] = dict.fromkeys(keys)
    if len(base) < 2:
        return fields
    gains = [tuned[item] - base[item] for item in base]
    estimate = estimate_ratio(gains, [1.0] * len(gains), resamples=resamples, seed=seed)
    fields |= {"difference_ci95": estimate.ci95, "p_value": estimate.p_value}
    fields["test"] = "paired bootstrap"
    if {*base.values(), *tuned.values()} <= {0.0, 1.0}:
        gained, lost = gains.count(1.0), gains.count(-1.0)
        changed = gained + lost
        p_value = float(binomtest(gained, changed, 0.5).pvalue) if changed else 1.0
        fields |= {"p_value": p_value, "test": "exact McNemar"}
        fields |= {"gained": gained, "lost": lost}
    return fields


def by_source(entries: Sequence[T], sources: Sequence[str]) -> dict[str, list[T]]:
    """Return entries by the source of each, in the order of their names."""
    return {
        name: [entry for entry, source in zip(entries, sources, strict=True) if source == name]
        for name in sorted(set(sources))
    }


def loss_fields(losses: Sequence[Loss], *, resamples: int, seed: int) -> dict[str, Any]:
    """Return the fields of `SourceLoss`, of a loss by document."""
    sums, tokens = zip(*losses, strict=True)
    loss = sum(sums) / sum(tokens)
    return {
        "loss": loss,
        "loss_ci95": estimate_ratio(sums, tokens, resamples=resamples, seed=seed).ci95,
        "perplexity": math.exp(loss),
        "documents": len(sums),
        "trained_tokens": sum(tokens),
    }


def difference_fields(
    pairs: Sequence[tuple[Loss, Loss]], *, resamples: int, seed: int
) -> dict[str, Any]:
    """Return the fields of `LossDifference`; pairs: the losses of a document before and after."""
    gains = [before - after for (before, _), (after, _) in pairs]
    tokens = [count for (_, count), _ in pairs]
    fields: dict[str, Any] = dict.fromkeys(("loss_difference", "loss_difference_ci95", "p_value"))
    if pairs:
        estimate = estimate_ratio(gains, tokens, resamples=resamples, seed=seed)
        mean = sum(gains) / sum(tokens)
        fields = dict(zip(fields, (mean, estimate.ci95, estimate.p_value), strict=True))
    return fields | {"documents": len(pairs)}
