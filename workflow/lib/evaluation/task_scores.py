"""Scores of tasks, item by item, and the paired comparison of two subjects: the fields of records
from the estimates of `intervals`. Both subjects see the same documents and items; whole documents
are the units, as their tokens are not independent.

The overlap of a task's items with training rows: the share of an item's tokens in runs of more than
10 tokens of a training row (Llama 2, arXiv 2307.09288, A.6, without skipped tokens). An item is
every text of its document, also answers that a prompt does not show. Runs that two items of a task
share are its wording, and do not count."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workflow.lib.artifacts.evaluation_record import LossDifference, MetricDifference, Task
from workflow.lib.evaluation.intervals import mean_gain, positive_ratio, signed_ratio

T = TypeVar("T")
Loss = tuple[float, float]  # summed over tokens, and their number, or the sum of their weights
Item = tuple[int, str, str]  # document number, hash of the document, hash of the prompt
MetricItems = dict[tuple[str, str], dict[Item, float]]
RUN = 11  # tokens
CHUNK_TOKENS = 2**20  # hashed at a time: 8 MiB
FACTORS = np.random.default_rng(0).integers(2**63, size=RUN, dtype=np.uint64) * 2 + 1
NONE = np.empty(0, np.uint64)
Array = npt.NDArray[Any]


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


def task_differences(base: TaskScores, tuned: TaskScores) -> dict[str, dict[str, MetricDifference]]:
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
                    base.items.get((name, metric), {}), tuned.items.get((name, metric), {})
                ),
            )
            for metric in score.metrics
            if metric in before
        }
    return differences


def paired_fields(base: dict[Item, float], tuned: dict[Item, float]) -> dict[str, Any]:
    """Return the fields of `MetricDifference` that follow from the items."""
    assert base.keys() == tuned.keys(), "base and tuned did not answer the same items"
    keys = ("difference_ci95", "p_value", "test", "gained", "lost")
    fields: dict[str, Any] = dict.fromkeys(keys)
    if not base:
        return fields
    before, after = list(base.values()), [tuned[item] for item in base]
    estimate = mean_gain(before, after)
    fields |= {"difference_ci95": estimate.ci95, "p_value": estimate.p_value, "test": "sign flips"}
    if {*before, *after} <= {0.0, 1.0}:
        changes = list(zip(before, after, strict=True))
        gained, lost = changes.count((0.0, 1.0)), changes.count((1.0, 0.0))
        fields |= {"test": "exact McNemar", "gained": gained, "lost": lost}
    return fields


def by_source(entries: Sequence[T], sources: Sequence[str]) -> dict[str, list[T]]:
    """Return entries by the source of each, in the order of their names."""
    return {
        name: [entry for entry, source in zip(entries, sources, strict=True) if source == name]
        for name in sorted(set(sources))
    }


def loss_fields(losses: Sequence[Loss], plain: Sequence[Loss] | None = None) -> dict[str, Any]:
    """Return the fields of `SourceLoss`, of a loss by document; plain: the same without weights."""
    sums, weights = zip(*losses, strict=True)
    nll, tokens = zip(*(plain or losses), strict=True)
    return {
        "loss": sum(sums) / sum(weights),
        "loss_ci95": positive_ratio(sums, weights).ci95,
        "perplexity": math.exp(sum(nll) / sum(tokens)),
        "documents": len(sums),
        "trained_tokens": sum(tokens),
    }


def difference_fields(pairs: Sequence[tuple[Loss, Loss]]) -> dict[str, Any]:
    """Return the fields of `LossDifference`; pairs: the losses of a document before and after."""
    fields: dict[str, Any] = dict.fromkeys(("loss_difference", "loss_difference_ci95", "p_value"))
    if pairs:
        gains = [before - after for (before, _), (after, _) in pairs]
        tokens = [count for (_, count), _ in pairs]
        estimate, mean = signed_ratio(gains, tokens), sum(gains) / sum(tokens)
        fields = dict(zip(fields, (mean, estimate.ci95, estimate.p_value), strict=True))
    return fields | {"documents": len(pairs)}


def text_difference_fields(
    pairs: Sequence[tuple[Loss, Loss]], sources: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of `TextDifference`; sources: of each pair."""
    by_name = {
        name: LossDifference(**difference_fields(own))
        for name, own in by_source(pairs, sources).items()
    }
    return difference_fields(pairs) | {"sources": by_name}


def overlap_shares(
    tasks: Mapping[str, Any], rows: Array, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[float | None]]:
    """Return the shares of the items of each task (of the harness, by name); None for an item
    without a text of `RUN` tokens. rows: token ids of the training rows, (rows, tokens)."""
    texts = {
        name: [_long_texts(document, tokenizer) for document in task.eval_docs]
        for name, task in tasks.items()
    }
    runs = {name: _own_runs(items) for name, items in texts.items()}
    searched = np.unique(np.concatenate([NONE, *runs.values()]))
    in_rows = np.zeros(len(searched), bool)
    step = max(1, CHUNK_TOKENS // rows.shape[1])
    for first in range(0, len(rows), step):
        in_rows |= np.isin(searched, _runs(rows[first : first + step]))
    repeated = {name: np.intersect1d(own, searched[in_rows]) for name, own in runs.items()}
    return {name: [_share(item, repeated[name]) for item in items] for name, items in texts.items()}


def _own_runs(items: list[list[Array]]) -> Any:
    """Return the runs of one item alone."""
    runs = [np.unique(np.concatenate([NONE, *map(_runs, item)])) for item in items]
    hashes, count = np.unique(np.concatenate([NONE, *runs]), return_counts=True)
    return hashes[count == 1]


def _share(item: list[Array], repeated: Array) -> float | None:
    inside = [np.convolve(np.isin(_runs(ids), repeated), np.ones(RUN)) > 0 for ids in item]
    return float(np.concatenate(inside).mean()) if inside else None


def _runs(ids: Array) -> Array:
    """Return a 64-bit hash of every run of `RUN` tokens of the last axis."""
    if ids.shape[-1] < RUN:
        return NONE
    padded = ids.astype(np.uint64) + np.uint64(1)
    return np.lib.stride_tricks.sliding_window_view(padded, RUN, axis=-1) @ FACTORS


def _long_texts(document: Any, tokenizer: PreTrainedTokenizerBase) -> list[Array]:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in _texts(document)]
    return [np.array(text) for text in ids if len(text) >= RUN]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
