"""Task names in a folder of YAML files, and a check for code, without the harness: its libraries
read their offline variables at import. Names as in lm_eval 0.4.13 (`tasks/_index.py`).

The harness imports the functions of `!function`, runs metrics that it does not know, and
Transformers runs `custom_generate`. So only known keys pass, and names of the harness' own
registries (the tests compare these tables with it)."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from workflow.lib.settings.evaluate import MEASURED_BY, EvaluateConfig, is_loss
from workflow.lib.settings.yaml_files import compose_yaml
from workflow.lib.system.environment import importing
from workflow.lib.system.errors import UserError, as_yaml, setting_error
from workflow.lib.system.near_names import near_names

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

# The evaluation's data are on disk. The harness would otherwise fork a process per core for its
# bootstraps, from a process with a GPU context.
NO_HUB_CODE = {"HF_EVALUATE_OFFLINE": "1"}  # the package `evaluate` runs downloaded code
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
SINGLE_PROCESS = {"DISABLE_MULTIPROC": "1"}

MAX_REPEATS = 1000  # the harness makes a copy of each item for each
GROUP_KEYS = frozenset(("group", "group_alias", "task", "tag", "aggregate_metric_list", "metadata"))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


METRICS = _words(
    "acc acc_all acc_bytes acc_mutual_info acc_norm bits_per_byte bleu brier_score bypass "
    "byte_perplexity chrf chrf++ exact_match f1 likelihood mcc perplexity ter word_perplexity"
)
AGGREGATIONS = _words(
    "bits_per_byte bleu brier_score bypass chrf chrf++ f1 matthews_corrcoef mean median nanmean "
    "perplexity ter weighted_perplexity"
)
# Without `custom`, which calls a function.
FILTERS = _words(
    "format_span lowercase majority_vote map multi_choice_regex regex regex_pos remove_whitespace "
    "take_first take_first_k uppercase"
)
SAMPLERS = frozenset({"default", "first_n"})
OUTPUT_TYPES = frozenset(
    {"loglikelihood", "loglikelihood_rolling", "generate_until", "multiple_choice"}
)
# Without the others of the package `datasets`: some import modules named in their options.
READERS = frozenset({"json", "csv", "parquet", "text", "arrow"})

PROMPT = _words(
    "doc_to_text doc_to_choice doc_to_target gen_prefix fewshot_delimiter target_delimiter"
)
TASK = PROMPT | _words(
    "task task_alias tag group group_alias include dataset_path dataset_name dataset_kwargs "
    "training_split validation_split test_split fewshot_split description fewshot_config "
    "num_fewshot metric_list output_type generation_kwargs repeats filter_list "
    "should_decontaminate doc_to_decontamination_query aggregate_metric_list metadata"
)
PARTS: Mapping[str, frozenset[str]] = {
    "dataset_kwargs": _words(
        "data_files data_dir split revision field delimiter sep names column_names header "
        "quotechar encoding columns sample_by keep_linebreaks"
    ),
    "fewshot_config": PROMPT | {"sampler", "split", "fewshot_indices", "samples"},
    "metric_list": _words(
        "metric aggregation higher_is_better regexes_to_ignore ignore_case ignore_punctuation "
        "ignore_numbers multi_target"
    ),
    "aggregate_metric_list": frozenset({"metric", "filter_list", "aggregation", "weight_by_size"}),
    "filter_list": frozenset({"name", "filter"}),
    "filter": _words(
        "function regex_pattern group_select fallback ignore_case ignore_punctuation "
        "regexes_to_ignore k mapping_dict default_value"
    ),
    "generation_kwargs": _words(
        "until max_gen_toks max_new_tokens min_new_tokens max_length do_sample temperature top_k "
        "top_p min_p typical_p repetition_penalty no_repeat_ngram_size num_beams length_penalty "
        "early_stopping"
    ),
}
NAMES: Mapping[str, frozenset[str]] = {
    "metric_list.metric": METRICS,
    "metric_list.aggregation": AGGREGATIONS,
    "aggregate_metric_list.aggregation": frozenset({"mean"}),
    "filter.function": FILTERS,
    "fewshot_config.sampler": SAMPLERS,
    "output_type": OUTPUT_TYPES,
}


def environment(settings: EvaluateConfig) -> dict[str, str]:
    """Return the variables to set before imports: offline, no hub code, if settings allow."""
    shipped = set(settings.tasks) - local_task_names(settings.tasks_dir)
    code = {} if settings.task_code else NO_HUB_CODE
    return SINGLE_PROCESS | code | ({} if shipped else OFFLINE)


def local_task_names(tasks_dir: str | None) -> set[str]:
    """Return the names of tasks, groups and tags defined in the folder's YAML files; none for no
    folder. Raises `UserError` if the folder does not exist or a file is not YAML."""
    if tasks_dir is None:
        return set()
    folder = Path(tasks_dir)
    if not folder.is_dir():
        raise setting_error(
            "evaluate.tasks_dir", tasks_dir, "there is no such folder", "Name a folder, or set null"
        )
    return {name for file in sorted(folder.rglob("*.yaml")) for name in _names(_read(file))}


def _read(file: Path) -> dict[str, list[str]]:
    """Return the strings of each top-level key. Nodes are composed: `!function` imports nothing."""
    root = _compose(file)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    return {str(key.value): _strings(value) for key, value in pairs}


def _compose(file: Path) -> yaml.Node | None:
    try:
        return compose_yaml(file)
    except (yaml.YAMLError, RecursionError) as error:
        raise _not_yaml(file, error) from None


def _not_yaml(file: Path, error: Exception) -> UserError:
    return UserError(f"{file}: is no YAML that can be read ({error}). Mend the file.")


def _strings(node: yaml.Node) -> list[str]:
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [str(item.value) for item in nodes if isinstance(item, yaml.ScalarNode)]


def _names(keys: dict[str, list[str]]) -> set[str]:
    """Return the names in one file; an included one may define none."""
    if "group" in keys:
        return {*keys["group"], *keys.get("tag", [])}  # its `task` lists members defined elsewhere
    return {*keys.get("task", []), *keys.get("tag", [])}


def refuse_code(tasks_dir: str) -> None:
    """Raise `UserError` if a task file of the folder, or an included one, may run Python: a tag
    such as `!function`, or a key that `TASK` does not know; or if its `repeats` are too
    many. `lm_eval_tasks` bounds templates and regular expressions in the files."""
    waiting, seen = sorted(Path(tasks_dir).rglob("*.yaml")), set[Path]()
    while waiting:
        file = waiting.pop().resolve()
        if file in seen:
            continue
        seen.add(file)
        definition = _definition(file, tasks_dir)
        for code in possible_code(definition):
            raise _code_error(file, code, tasks_dir)
        members = definition.get("task")
        for one in (definition, *(members if isinstance(members, list) else [members])):
            if isinstance(one, Mapping):
                refuse_repeats(one.get("repeats"), file=file.name)
        included = definition.get("include") or []
        included = included if isinstance(included, list) else [included]
        waiting += [file.parent / str(name) for name in included]


def refuse_repeats(repeats: Any, *, file: str) -> None:
    """Raise `UserError` for a number of answers to each item that no memory holds."""
    if repeats is not None and repeats not in range(1, MAX_REPEATS + 1):
        raise UserError(
            f"evaluate.tasks: {file}: repeats = {as_yaml(repeats)[:80]}, the answers to each item, "
            f"must be a number from 1 to {MAX_REPEATS}. Change it in the task's file, or remove "
            "the task."
        )


def _definition(file: Path, tasks_dir: str) -> dict[Any, Any]:
    """Return a file's content, merged keys included; empty for files that the harness skips."""
    root = _compose(file)
    try:
        value = yaml.SafeLoader("").construct_document(root) if root else None
    except yaml.constructor.ConstructorError as error:  # not one of YAML's own tags
        raise _code_error(file, str(error.problem), tasks_dir) from None
    except (ValueError, OverflowError, RecursionError) as error:  # an impossible date
        raise _not_yaml(file, error) from None
    return value if isinstance(value, dict) else {}


def _code_error(file: Path, code: str, tasks_dir: str) -> UserError:
    return setting_error(
        "evaluate.tasks_dir",
        tasks_dir,
        f"{file.name} may run code ({code}), which evaluate.task_code = false forbids",
        "Read that code; if you trust it, set evaluate.task_code to true",
    )


def check_tasks(settings: EvaluateConfig) -> None:
    """Raise `UserError` before the training for a task that does not exist or cannot run, and for a
    requirement that none measures. Reads definitions alone; local tasks without code need no
    harness, whose import takes seconds."""
    required = [name for name in settings.require if not is_loss(name) and name not in MEASURED_BY]
    shipped = set(settings.tasks) - local_task_names(settings.tasks_dir)
    if not (
        shipped or required or (settings.tasks and (settings.task_code or settings.num_fewshot))
    ):
        return
    manager = known_tasks(settings)
    index = {name: entry.cfg or {} for name, entry in manager.task_index.items()}
    tagged = {n: e.tags for n, e in manager.task_index.items() if n in manager.all_tags}
    measured: dict[str, Mapping[str, Any]] = {}
    for name in settings.tasks:
        measured |= _members(name, index, tagged)
    for name, definition in measured.items():
        _refuse_undefined(name, definition, settings)
    for name in required:
        _check_requirement(name, {k: v for k, v in measured.items() if k not in tagged})


def _refuse_undefined(name: str, definition: Mapping[str, Any], settings: EvaluateConfig) -> None:
    refuse_unrunnable(
        name,
        runs_code=bool(definition.get("unsafe_code")),
        is_multimodal=bool(definition.get("doc_to_image") or definition.get("doc_to_audio")),
        num_fewshot=definition.get("num_fewshot"),
        settings=settings,
    )
    if settings.task_code or definition.get("process_results"):
        return
    for entry in definition.get("metric_list") or []:
        metric = str(entry["metric"])
        # The harness' own functions are paths here.
        if entry.get("hf_evaluate") or (metric not in METRICS and not Path(metric).is_absolute()):
            raise setting_error(
                "evaluate.tasks",
                name,
                f"its metric {metric} is code that the package `evaluate` downloads and runs, "
                "which evaluate.task_code = false forbids",
                "Remove the task, or set evaluate.task_code to true",
            )


def refuse_unrunnable(
    name: str,
    *,
    runs_code: bool,
    is_multimodal: bool,
    num_fewshot: int | None,
    settings: EvaluateConfig,
) -> None:
    """Raise `UserError` for settings that the harness would refuse late, or silently ignore."""
    if runs_code:
        raise setting_error(
            "evaluate.tasks", name, "it runs code that the model writes", "Remove it"
        )
    if is_multimodal:
        raise setting_error("evaluate.tasks", name, "it needs images or sound", "Remove it")
    if settings.num_fewshot and num_fewshot == 0:
        raise setting_error(
            "evaluate.num_fewshot",
            settings.num_fewshot,
            f"the task {name} is defined without examples (num_fewshot: 0)",
            "Set it to 0, or remove the task",
        )


def known_tasks(settings: EvaluateConfig) -> "TaskManager":
    """Return the harness' index of tasks: of the folder, and its own thousands if `evaluate.tasks`
    names others. Raises `UserError` for a task in neither."""
    with importing():
        from lm_eval import __version__
        from lm_eval.tasks import TaskManager

    shipped = set(settings.tasks) - local_task_names(settings.tasks_dir)
    manager = TaskManager(include_path=settings.tasks_dir, include_defaults=bool(shipped))
    for name in settings.tasks:
        if name not in manager.all_tasks:
            raise unknown_task(name, manager.all_tasks, settings=settings, version=__version__)
    return manager


def unknown_task(
    name: str, tasks: Collection[str], *, settings: EvaluateConfig, version: str
) -> UserError:
    nearest = near_names(name, tasks, count=3)
    folder = f"in {settings.tasks_dir} nor " if settings.tasks_dir else ""
    return setting_error(
        "evaluate.tasks",
        list(settings.tasks),
        f"{name!r} is {'neither ' if folder else 'not '}{folder}among the tasks of lm_eval "
        f"{version}",
        f"Did you mean {' or '.join(nearest)}?" if nearest else "Correct the name, or remove it",
    )


def _members(
    name: str, index: Mapping[str, Mapping[str, Any]], tagged: Mapping[str, Collection[str]]
) -> dict[str, Mapping[str, Any]]:
    """Return the definition of a task; or of a group or tag and all below it, by name. index:
    definitions; tagged: the tasks of tags. A group's settings override its members'."""
    definitions: dict[str, Mapping[str, Any]] = {}
    waiting: list[tuple[Any, dict[str, Any]]] = [(name, {})]
    while waiting:
        one, settings = waiting.pop()
        if isinstance(one, Mapping):
            one, settings = one.get("group", one.get("task")), settings | dict(one)
        if str(one) in definitions:
            continue
        definition = definitions[str(one)] = {**index.get(str(one), {}), **settings}
        below = {key: value for key, value in definition.items() if key not in GROUP_KEYS}
        members = definition.get("task") if "group" in definition else []
        waiting += [(m, below) for m in (members if isinstance(members, list) else [members])]
        waiting += [(task, below) for task in tagged.get(str(one), ())]
    return definitions


def _check_requirement(name: str, measured: Mapping[str, Mapping[str, Any]]) -> None:
    task, _, metric = name.partition("/")
    if task not in measured:
        names = ", ".join(sorted(measured)) or "none"
        reason = f"{task!r} is not among the tasks that are run ({names})"
        change = "Add it to evaluate.tasks, or correct the requirement"
        raise setting_error("evaluate.require", name, reason, change)
    metrics = _metrics(measured[task])
    if metrics and metric not in metrics:
        reason = f"the task measures {', '.join(metrics)}"
        raise setting_error("evaluate.require", name, reason, "Name one of these")


def _metrics(definition: Mapping[str, Any]) -> list[str]:
    """Return the names of a task's metrics in results, with filters' if it defines any."""
    listed = [str(entry["metric"]) for entry in definition.get("metric_list") or []]
    filters = [entry["name"] for entry in definition.get("filter_list") or []] or ["none"]
    return [metric if one == "none" else f"{metric},{one}" for metric in listed for one in filters]


def possible_code(definition: Mapping[Any, Any]) -> Iterator[str]:
    """Yield, in words, keys and names of a task, group or member that may run code."""
    yield from _unknown(definition, TASK, prefix="")
    yield from _dataset(definition.get("dataset_path"))
    for member in _listed(definition.get("task")):
        if isinstance(member, Mapping):
            yield from possible_code(member)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _unknown(section: Mapping[Any, Any], keys: frozenset[str], *, prefix: str) -> Iterator[str]:
    for key, value in section.items():
        if value is None or value is False:  # not used: `process_docs: null`
            continue
        names = NAMES.get(f"{prefix}{key}")
        if key not in keys:
            yield f"{prefix}{key}, which is none of the keys {', '.join(sorted(keys))}"
        elif names is not None and (not isinstance(value, str) or value not in names):
            yield (
                f"{prefix}{key} = {str(value)[:80]!r}, which is none of the harness' own: "
                f"{', '.join(sorted(names))}"
            )
        elif key in PARTS:
            for entry in _listed(value):
                if isinstance(entry, Mapping):
                    yield from _unknown(entry, PARTS[key], prefix=f"{key}.")
                else:
                    yield f"{prefix}{key} = {str(entry)[:80]!r}, which is no section"


def _dataset(path: Any) -> Iterator[str]:
    """Names other than a reader, a hub repository or a folder are readers that may import code."""
    if path is None or path in READERS:
        return
    if not isinstance(path, str) or "/" not in path or "://" in path:
        yield (
            f"dataset_path = {str(path)[:80]!r}, which is none of {', '.join(sorted(READERS))}, no "
            "folder (./name) and no repository (owner/name)"
        )
