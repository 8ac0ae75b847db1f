"""Tasks of the LM Evaluation Harness (lm_eval 0.4.13) on a model that is loaded already.

The thousands of shipped tasks are indexed only if a task is not local. Each task is loaded and run
by itself, and all subjects run the same objects with the same seeds, so their items are paired.

The harness renders templates in a plain Jinja environment, from which code can reach the
interpreter. So a sandbox replaces the environment, a variable of the harness's `utils`; `limits`
stop endless loops and texts."""

import hashlib
import json
import logging
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import lm_eval
import numpy as np
import torch
from jinja2 import Environment, StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval import utils
from lm_eval.api.metrics import mean
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from torch import nn
from transformers import PreTrainedTokenizerBase

from workflow.lib.artifacts.evaluation_record import Metric, Task
from workflow.lib.distributed.world import World
from workflow.lib.evaluation.lm_eval_model import SharingHFLM
from workflow.lib.evaluation.task_files import (
    known_tasks,
    local_task_names,
    refuse_code,
    refuse_repeats,
    refuse_unrunnable,
)
from workflow.lib.evaluation.task_scores import MetricItems, TaskScores
from workflow.lib.settings.config import EvaluateConfig
from workflow.lib.system import limits
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import file_sha256
from workflow.lib.system.limits import BoundedWork, excess_error
from workflow.lib.system.undocumented_interfaces import check_interfaces

logger = logging.getLogger("workflow")

BOOTSTRAP = 1000  # resamples for the standard error of corpus-level metrics
LoadedTasks = dict[str, Any]  # the harness's TaskDict: `tasks`, `groups`, `group_map`


def load_tasks(
    settings: EvaluateConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    trained_template_sha256: str | None,
) -> dict[str, LoadedTasks]:
    """Load every task of `evaluate.tasks` with its data; members come under the name of a group or
    tag. trained_template_sha256: None for plain text. Raises `UserError` for a task that is
    unknown, cannot be loaded, or cannot run with the settings."""
    check_interfaces("lm_eval")
    sandbox_task_templates()
    if settings.tasks_dir and not settings.task_code:
        refuse_code(settings.tasks_dir)
    if settings.tasks and settings.apply_chat_template:
        _check_template(tokenizer, trained_template_sha256)
    shipped = sorted(set(settings.tasks) - local_task_names(settings.tasks_dir))
    manager = known_tasks(settings)
    loaded = {name: _load(name, manager, settings, shipped) for name in settings.tasks}
    for name, task in (pair for tasks in loaded.values() for pair in tasks["tasks"].items()):
        refuse_repeats(task.get_config("repeats"), file=name)
        refuse_unrunnable(
            name,
            runs_code=getattr(task, "UNSAFE_CODE", False),
            is_multimodal=getattr(task, "MULTIMODAL", False),
            num_fewshot=task.get_config("num_fewshot"),
            settings=settings,
        )
        task.set_config(key="num_fewshot", value=settings.num_fewshot)
    return loaded


def task_facts(
    tasks: LoadedTasks, *, settings: EvaluateConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return as JSON all that scores of loaded tasks depend on besides the model: definitions,
    items and Python files of `evaluate.tasks_dir` by content."""
    folder = settings.tasks_dir
    code = sorted(Path(folder).rglob("*.py")) if folder else []
    template = tokenizer.chat_template if settings.apply_chat_template else None
    return {
        "definitions": {name: _definition(task) for name, task in tasks["tasks"].items()},
        "groups": sorted(tasks.get("groups", {})),
        "code": [file_sha256(path) for path in code],
        "chat_template": template,
        "lm_eval": lm_eval.__version__,
        "bootstrap_resamples": BOOTSTRAP,
        **settings.model_dump(mode="json", include={"num_fewshot", "task_limit", "seed"}),
    }


def _definition(task: Any) -> str:
    digest = hashlib.sha256(_text(task.dump_config()))
    for item in task.eval_docs:
        digest.update(_text(item))
    if task.get_config("num_fewshot"):
        for example in task.fewshot_docs():
            digest.update(_text(example))
    return digest.hexdigest()


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _check_template(tokenizer: PreTrainedTokenizerBase, trained_sha256: str | None) -> None:
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
            "the tokens were made with another chat template than the one that would wrap the task "
            "items",
            "Give that template as --chat-template (data.chat_template), or set it to false",
        )


def _load(
    name: str, manager: TaskManager, settings: EvaluateConfig, shipped: list[str]
) -> LoadedTasks:
    """Load definitions and data; errors of a task file or its data set become the user's."""
    try:
        loaded = dict(manager.load([_with_data(name, manager)]))
        return loaded | {"tasks": {n: _BoundedTask(t) for n, t in loaded["tasks"].items()}}
    except UserError:  # of a stopped template, or of our readers
        raise
    except Exception as error:
        change = (
            f"{name}: shipped tasks load their data from the Hugging Face hub. Run where it can be "
            "reached once, or put a task file with local data into evaluate.tasks_dir"
            if name in shipped
            else (
                f"Mend the task's file in {settings.tasks_dir}; paths in it count from the "
                "folder you run in, else from the file's own and those above it"
            )
        )
        raise setting_error(
            "evaluate.tasks",
            list(settings.tasks),
            f"{name} cannot be loaded ({type(error).__name__}: {error})",
            change,
        ) from error


def _with_data(name: str, manager: TaskManager) -> str | dict[str, Any]:
    """Return the task for the harness. Data files that the working folder lacks are searched beside
    the task's own file, and above it."""
    entry = manager.task_index[name]
    options = (entry.cfg or {}).get("dataset_kwargs") or {}
    files = options.get("data_files")
    if not isinstance(files, dict) or not entry.yaml_path:
        return name
    paths = {split: _data_file(entry.yaml_path, file) for split, file in files.items()}
    if paths == files:
        return name
    definition: dict[str, Any] = load_yaml(entry.yaml_path)
    return definition | {"dataset_kwargs": options | {"data_files": paths}}


def _data_file(task: Path, file: Any) -> Any:
    """Return a data file itself, or its path in the nearest folder above the task's file."""
    if not isinstance(file, str) or Path(file).exists():
        return file
    return next((str(x / file) for x in task.parents if (x / file).exists()), file)


def run_tasks(
    model: nn.Module,
    tasks: LoadedTasks,
    *,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluateConfig,
    world: World | None = None,
) -> TaskScores:
    """Run the tasks on `model` as it is now (adapter on or off), with order and draws by
    `evaluate.seed`. Collective over `world`, whose processes share the requests; None: alone."""
    _seed(settings.seed, tasks)
    results = lm_eval.evaluate(
        lm=SharingHFLM(model, tokenizer, batch_size=settings.batch_size, world=world),
        task_dict=tasks,
        limit=settings.task_limit,
        bootstrap_iters=BOOTSTRAP,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.apply_chat_template,
    )
    return TaskScores(scores=_scores(results), items=_items(results["samples"], tasks["tasks"]))


def _seed(seed: int, tasks: LoadedTasks) -> None:
    """Seed all generators that tasks may use, as the harness's own `simple_evaluate` does."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=seed)


def _scores(results: dict[str, Any]) -> dict[str, Task]:
    return {
        name: Task(
            metrics=_metrics(
                name, result, higher_is_better=results["higher_is_better"].get(name) or {}
            ),
            items=int(result["sample_len"]),
            version=results["versions"][name],
        )
        for name, result in results["results"].items()
        if "sample_len" in result  # a group without an aggregate has no score of its own
    }


def _metrics(
    task: str, result: dict[str, Any], *, higher_is_better: dict[str, bool | None]
) -> dict[str, Metric]:
    """Return the metrics of one task from the harness's `metric,filter` keys."""
    metrics: dict[str, Metric] = {}
    for key, value in result.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        if not _is_finite(value):
            logger.warning("task %s: %s is %s, no finite number: left out", task, key, value)
            continue
        stderr = result.get(f"{metric}_stderr,{filtered}")
        metrics[_metric_name(metric, filtered)] = Metric(
            value=float(value),
            stderr=float(stderr) if _is_finite(stderr) else None,
            higher_is_better=higher_is_better.get(metric),
        )
    return metrics


def _metric_name(metric: str, filtered: str) -> str:
    return metric if filtered == "none" else f"{metric},{filtered}"


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def _items(samples: dict[str, list[dict[str, Any]]], tasks: dict[str, Any]) -> MetricItems:
    """Return the per-item values of every metric that is their mean."""
    items: MetricItems = {}
    for name, rows in samples.items():
        means = {metric for metric, how in tasks[name].aggregation().items() if how is mean}
        for row in rows:
            item = (int(row["doc_id"]), row["doc_hash"], row["prompt_hash"])
            for metric in means.intersection(row["metrics"]):
                if _is_finite(row[metric]):
                    values = items.setdefault((name, _metric_name(metric, row["filter"])), {})
                    values[item] = float(row[metric])
    return items


FILTERS_EXCESS, METRICS_EXCESS = (
    f"evaluate.tasks: {{item}}: {part} {{excess}}. Correct it in the task's file, its regular "
    "expressions without repetitions within repetitions, as (a+)+, or remove the task."
    for part in ("filter_list", "metric_list, for one item,")
)


def _bounded(message: str, item: str, call: Callable[[], Any], *, items: int = 1) -> Any:
    """Return the call's value; raise `UserError` with the message for excess or an error."""
    try:
        with BoundedWork(message, item, max_seconds=limits.MAX_SECONDS * (1 + items // 1000)):
            return call()
    except UserError:
        raise
    except Exception as error:
        raise excess_error(message, item, f"fails ({type(error).__name__}: {error})") from error


class _BoundedTask:
    """A task whose filters and metrics, with regular expressions of its file, are bounded."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self._name = str(task.config.task)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def apply_filters(self) -> Any:
        items = len(self._task.instances)
        return _bounded(FILTERS_EXCESS, self._name, self._task.apply_filters, items=items)

    def process_results(self, doc: Any, results: Any) -> Any:
        scored = partial(self._task.process_results, doc, results)
        return _bounded(METRICS_EXCESS, self._name, scored)


# An item of a task is a prompt for a model; the longest context has some million tokens.
MAX_RENDERED_CHARS = 2**24


def sandbox_task_templates() -> None:
    if not isinstance(utils.env, ImmutableSandboxedEnvironment):
        utils.env = sandboxed(utils.env)


TEMPLATE_EXCESS = (
    "evaluate.tasks: the template {item} of a task {excess} for one item. Change it in the task's "
    "file, or remove the task."
)


class _BoundedTemplate(Template):
    source = ""

    def render(self, *args: Any, **kwargs: Any) -> str:
        text: str = _bounded(TEMPLATE_EXCESS, self.source, partial(super().render, *args, **kwargs))
        if len(text) > MAX_RENDERED_CHARS:
            raise excess_error(
                TEMPLATE_EXCESS,
                self.source,
                f"writes {len(text)} characters, more than {MAX_RENDERED_CHARS}",
            )
        return text


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """Also bounds the compilation of templates, in which Jinja computes constants."""

    template_class = _BoundedTemplate

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        with BoundedWork(TEMPLATE_EXCESS, str(source)):
            template = super().from_string(source, *args, **kwargs)
        assert isinstance(template, _BoundedTemplate), "the environment names the class"
        template.source = str(source)
        return template


def sandboxed(environment: Environment) -> ImmutableSandboxedEnvironment:
    """Return a sandbox with the filters and newlines of the harness's environment."""
    filters: dict[str, Any] = environment.filters
    assert environment.undefined is StrictUndefined, "the harness's environment has changed"
    sandbox = _BoundedSandbox(
        undefined=StrictUndefined, keep_trailing_newline=environment.keep_trailing_newline
    )
    sandbox.filters.update(filters)
    return sandbox
