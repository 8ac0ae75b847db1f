"""What tasks scored, item by item, and the paired comparison of two subjects.

Where every item is right or wrong, the p-value is that of the exact McNemar test (McNemar 1947):
binomial, over the items that one of the two alone answered rightly. Elsewhere: the bootstrap's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scipy.stats import binomtest  # type: ignore[import-untyped]

from workflow.lib.artifacts.evaluation_record import MetricDifference, Task
from workflow.lib.evaluation.bootstrap import estimate_ratio

Item = tuple[int, str, str]  # document number, hash of the document, hash of the prompt
MetricItems = dict[tuple[str, str], dict[Item, float]]


@dataclass(frozen=True)
class TaskScores:
    """What one subject scored: the artifact's `tasks`, and by (task, metric) the `items` whose mean
    the metric is (none of corpus-level ones and groups)."""

    scores: dict[str, Task]
    items: MetricItems

    def to_json(self) -> dict[str, Any]:
        items = [
            {"task": task, "metric": metric, "values": [[*item, v] for item, v in values.items()]}
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
        if name not in base.scores:  # of a model that was read layer by layer
            continue
        before = base.scores[name].metrics
        differences[name] = {
            metric: MetricDifference(
                difference=score.metrics[metric].value - before[metric].value,
                **_paired_fields(
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


def _paired_fields(
    base: dict[Item, float], tuned: dict[Item, float], *, resamples: int, seed: int
) -> dict[str, Any]:
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
        fields |= {"p_value": mcnemar(gained, lost), "test": "exact McNemar"}
        fields |= {"gained": gained, "lost": lost}
    return fields


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of as many items gained as lost."""
    changed = gained + lost
    return float(binomtest(gained, changed, 0.5).pvalue) if changed else 1.0
