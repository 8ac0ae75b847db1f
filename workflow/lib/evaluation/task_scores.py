"""What tasks scored, item by item, and the paired comparison of two subjects.

The harness gives a mean's standard error; intervals and p-values of a paired difference are ours.
Where every item is right or wrong, the p-value is that of the exact McNemar test: the two-sided
binomial test of the items that only one of the two answered rightly (McNemar 1947). Elsewhere it is
that of the bootstrap.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scipy.stats import binomtest  # type: ignore[import-untyped]

from workflow.lib.evaluation.bootstrap import estimate_ratio

Item = tuple[int, str, str]  # document number, hash of the document, hash of the prompt
MetricItems = dict[tuple[str, str], dict[Item, float]]


@dataclass(frozen=True)
class TaskScores:
    """What one subject scored.

    `scores`: the artifact's `tasks`. `items`: by (task, metric), the values whose mean the metric
    is; metrics that are no mean over items (corpus-level ones, groups) are not in it.
    """

    scores: dict[str, dict[str, Any]]
    items: MetricItems

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON, for the archive."""
        items = [
            {"task": task, "metric": metric, "values": [[*item, v] for item, v in values.items()]}
            for (task, metric), values in self.items.items()
        ]
        return {"scores": self.scores, "items": items}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "TaskScores":
        """Return what `to_json` stored."""
        items = {
            (entry["task"], entry["metric"]): {
                (number, document, prompt): value
                for number, document, prompt, value in entry["values"]
            }
            for entry in stored["items"]
        }
        return cls(scores=dict(stored["scores"]), items=items)

    def __or__(self, other: "TaskScores") -> "TaskScores":
        """Return the scores of both."""
        return TaskScores(scores=self.scores | other.scores, items=self.items | other.items)


NO_SCORES = TaskScores(scores={}, items={})


def task_differences(
    base: TaskScores, tuned: TaskScores, *, resamples: int, seed: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by task and metric: `difference` (tuned - base), `difference_ci95`, `p_value`, `test`,
    `gained`, `lost`.

    Interval and p-value are None where there are no two items, or where the metric is no mean over
    items; `gained` and `lost` count the items that only the tuned or only the base answered
    rightly, None where values are not 0 and 1.
    """
    differences: dict[str, dict[str, dict[str, Any]]] = {}
    for name, score in tuned.scores.items():
        before = base.scores[name]["metrics"]
        differences[name] = {
            metric: {
                "difference": score["metrics"][metric]["value"] - before[metric]["value"],
                **_paired(
                    base.items.get((name, metric), {}),
                    tuned.items.get((name, metric), {}),
                    resamples=resamples,
                    seed=seed,
                ),
            }
            for metric in score["metrics"]
            if metric in before
        }
    return differences


def _paired(
    base: dict[Item, float], tuned: dict[Item, float], *, resamples: int, seed: int
) -> dict[str, Any]:
    assert base.keys() == tuned.keys(), "base and tuned did not answer the same items"
    keys = ("difference_ci95", "p_value", "test", "gained", "lost")
    found: dict[str, Any] = dict.fromkeys(keys)
    if len(base) < 2:
        return found
    gains = [tuned[item] - base[item] for item in base]
    estimate = estimate_ratio(gains, [1.0] * len(gains), resamples=resamples, seed=seed)
    found |= {"difference_ci95": list(estimate.ci95), "p_value": estimate.p_value}
    found["test"] = "paired bootstrap"
    if {*base.values(), *tuned.values()} <= {0.0, 1.0}:
        gained, lost = gains.count(1.0), gains.count(-1.0)
        found |= {"p_value": mcnemar(gained, lost), "test": "exact McNemar"}
        found |= {"gained": gained, "lost": lost}
    return found


def mcnemar(gained: int, lost: int) -> float:
    """Return the two-sided p-value of as many items gained as lost."""
    changed = gained + lost
    return float(binomtest(gained, changed, 0.5).pvalue) if changed else 1.0
