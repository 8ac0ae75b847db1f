"""Tasks of the LM Evaluation Harness (lm_eval 0.4.13) on a model that is loaded already.

Local task files come first; the thousands of shipped ones are indexed only if a task is not local.
Base and tuned run the same task objects with the same seeds, so their items pair up one to one.
The harness gives a mean's standard error; the interval of a paired difference is ours (`bootstrap`).
"""

import difflib
import hashlib
import logging
import math
import random
import sys
from dataclasses import dataclass
from typing import Any, TypeGuard

import lm_eval
import numpy as np
import torch
from lm_eval.api.metrics import mean
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import nn
from transformers import PreTrainedTokenizerBase

from workflow.lib.bootstrap import estimate_ratio
from workflow.lib.config import EvaluateConfig
from workflow.lib.errors import UserError, setting_error
from workflow.lib.local_tasks import local_task_names, refuse_code
from workflow.lib.sandbox import sandbox_task_templates

logger = logging.getLogger("workflow")

_NO_TERMINAL = not sys.stderr.isatty()
LoadedTasks = dict[str, Any]  # the harness's TaskDict: `tasks`, `groups`, `group_map`
Item = tuple[int, str, str]  # document number, hash of the document, hash of the prompt


@dataclass(frozen=True)
class TaskScores:
    """What one subject scored.

    `scores`: the artifact's `tasks`. `items`: by (task, metric), the values whose mean the metric is;
    metrics that are no mean over items (corpus-level ones, groups) are not in it.
    """

    scores: dict[str, dict[str, Any]]
    items: dict[tuple[str, str], dict[Item, float]]


def load_tasks(
    settings: EvaluateConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    trained_template_sha256: str | None,
) -> LoadedTasks:
    """Load every task of `evaluate.tasks` with its data.

    `trained_template_sha256`: digest of the chat template that made the tokens; None for plain text. Raises
    `UserError` for an unknown task, one whose file or data cannot be loaded, and one that cannot
    run as the settings say.
    """
    sandbox_task_templates()
    if settings.tasks_dir and not settings.task_code:
        refuse_code(settings.tasks_dir)
    if settings.tasks and settings.apply_chat_template:
        _check_template(tokenizer, trained_template_sha256)
    shipped = sorted(set(settings.tasks) - local_task_names(settings.tasks_dir))
    manager = TaskManager(include_path=settings.tasks_dir, include_defaults=bool(shipped))
    for name in settings.tasks:
        if name not in manager.all_tasks:
            raise _unknown_task(name, known=manager.all_tasks, settings=settings)
    loaded = _load(manager, settings, shipped)
    for name, task in loaded["tasks"].items():
        _refuse_unrunnable(name, task, settings)
        task.set_config(key="num_fewshot", value=settings.num_fewshot)
    return loaded


def _check_template(tokenizer: PreTrainedTokenizerBase, trained_sha256: str | None) -> None:
    """Raise `UserError` if the tokenizer has no chat template, or another than the one trained on."""
    template = tokenizer.chat_template
    if template is None:
        raise setting_error(
            "evaluate.apply_chat_template",
            True,
            "the base model's tokenizer has no chat template",
            "Set it to false, or name a template in data.chat_template",
        )
    text = template["default"] if isinstance(template, dict) else template
    if trained_sha256 not in (None, hashlib.sha256(text.encode()).hexdigest()):
        raise setting_error(
            "evaluate.apply_chat_template",
            True,
            "the tokens were made with another chat template than the one that would wrap the task items",
            "Give that template as --chat-template (data.chat_template), or set it to false",
        )


def _unknown_task(name: str, *, known: list[str], settings: EvaluateConfig) -> UserError:
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    folder = f"in {settings.tasks_dir} nor " if settings.tasks_dir else ""
    return setting_error(
        "evaluate.tasks",
        list(settings.tasks),
        f"{name!r} is {'neither ' if folder else 'not '}{folder}among the tasks of lm_eval {lm_eval.__version__}",
        f"Did you mean {' or '.join(nearest)}?" if nearest else "Correct the name, or remove it",
    )


def _load(manager: TaskManager, settings: EvaluateConfig, shipped: list[str]) -> LoadedTasks:
    """Load definitions and data; whatever a task file or its data set raises is the user's to mend."""
    try:
        return dict(manager.load(list(settings.tasks)))
    except Exception as error:
        change = (
            f"{', '.join(shipped)}: shipped tasks load their data from the Hugging Face hub. Run where it can be "
            "reached once, or put a task file with local data into evaluate.tasks_dir"
            if shipped
            else f"Mend the task's file in {settings.tasks_dir}; paths in it count from the folder you run in"
        )
        raise setting_error(
            "evaluate.tasks",
            list(settings.tasks),
            f"they cannot be loaded ({type(error).__name__}: {error})",
            change,
        ) from error


def _refuse_unrunnable(name: str, task: Any, settings: EvaluateConfig) -> None:
    """Raise `UserError` for what the harness would refuse only after the model ran, or would silently ignore."""
    lacks = {
        "it runs code that the model writes": getattr(task, "UNSAFE_CODE", False),
        "it needs images or sound": getattr(task, "MULTIMODAL", False),
    }
    for reason in (reason for reason, lacking in lacks.items() if lacking):
        raise setting_error("evaluate.tasks", name, reason, "Remove it")
    if settings.num_fewshot and task.get_config("num_fewshot") == 0:
        raise setting_error(
            "evaluate.num_fewshot",
            settings.num_fewshot,
            f"the task {name} is defined without examples (num_fewshot: 0)",
            "Set it to 0, or remove the task",
        )


def run_tasks(
    model: nn.Module,
    tasks: LoadedTasks,
    *,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluateConfig,
) -> TaskScores:
    """Run the tasks on `model` as it is now (adapter on or off); the order and the draws are set by `evaluate.seed`."""
    if not tasks["tasks"]:
        return TaskScores(scores={}, items={})
    _seed(settings.seed, tasks)
    results = lm_eval.evaluate(
        lm=_TerminalHFLM(pretrained=model, tokenizer=tokenizer, batch_size=settings.batch_size),
        task_dict=tasks,
        limit=settings.task_limit,
        bootstrap_iters=settings.bootstrap_resamples,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.apply_chat_template,
    )
    return TaskScores(scores=_scores(results), items=_items(results["samples"], tasks["tasks"]))


class _TerminalHFLM(HFLM):  # type: ignore[misc]
    """The harness's model, its bars (which are always on) on terminals only."""

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or _NO_TERMINAL)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm or _NO_TERMINAL)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().generate_until(requests, disable_tqdm=disable_tqdm or _NO_TERMINAL)


def _seed(seed: int, tasks: LoadedTasks) -> None:
    """Seed what tasks may draw from, as the harness's own `simple_evaluate` does."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=seed)


def _scores(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "metrics": _metrics(name, result),
            "items": int(result["sample_len"]),
            "version": results["versions"][name],
        }
        for name, result in results["results"].items()
        if "sample_len" in result  # a group without an aggregate has no score of its own
    }


def _metrics(task: str, result: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return {metric: {value, stderr}} of one task from the harness's `metric,filter` keys."""
    metrics: dict[str, dict[str, float | None]] = {}
    for key, value in result.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        if not _is_finite(value):
            logger.warning("task %s: %s is %s, no finite number: left out", task, key, value)
            continue
        stderr = result.get(f"{metric}_stderr,{filtered}")
        metrics[_metric_name(metric, filtered)] = {
            "value": float(value),
            "stderr": float(stderr) if _is_finite(stderr) else None,
        }
    return metrics


def _metric_name(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric},{filtered}"


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def _items(
    samples: dict[str, list[dict[str, Any]]], tasks: dict[str, Any]
) -> dict[tuple[str, str], dict[Item, float]]:
    """Return the per-item values of every metric that is their mean."""
    items: dict[tuple[str, str], dict[Item, float]] = {}
    for name, rows in samples.items():
        means = {metric for metric, how in tasks[name].aggregation().items() if how is mean}
        for row in rows:
            item = (int(row["doc_id"]), row["doc_hash"], row["prompt_hash"])
            for metric in means.intersection(row["metrics"]):
                if _is_finite(row[metric]):
                    of_metric = items.setdefault((name, _metric_name(metric, row["filter"])), {})
                    of_metric[item] = float(row[metric])
    return items


def task_differences(
    base: TaskScores, tuned: TaskScores, *, resamples: int, seed: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by task and metric `difference` (tuned - base) and `difference_ci95` over the paired items.

    The interval is None where there are no two items, or where the metric is no mean over items.
    """
    differences: dict[str, dict[str, dict[str, Any]]] = {}
    for name, score in tuned.scores.items():
        before = base.scores[name]["metrics"]
        shared = [metric for metric in score["metrics"] if metric in before]
        differences[name] = {
            metric: {
                "difference": score["metrics"][metric]["value"] - before[metric]["value"],
                "difference_ci95": _paired_interval(
                    base.items.get((name, metric), {}),
                    tuned.items.get((name, metric), {}),
                    resamples=resamples,
                    seed=seed,
                ),
            }
            for metric in shared
        }
    return differences


def _paired_interval(
    base: dict[Item, float], tuned: dict[Item, float], *, resamples: int, seed: int
) -> list[float] | None:
    assert base.keys() == tuned.keys(), "base and tuned did not answer the same items"
    if len(base) < 2:
        return None
    paired = [tuned[item] - base[item] for item in base]
    return list(estimate_ratio(paired, [1.0] * len(paired), resamples=resamples, seed=seed).ci95)
