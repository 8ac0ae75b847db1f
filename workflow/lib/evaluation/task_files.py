"""Which task names a folder of YAML files defines, and whether it would run code, read without the
harness.

The stage must know before it imports anything of Hugging Face whether the tasks need the hub: the
libraries read their offline variables at import. Kinds of names as in lm_eval 0.4.13
(`tasks/_index.py`).
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from workflow.lib.settings.evaluate import HELDOUT_LOSS, EvaluateConfig
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.importing import importing

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

# Everything the evaluation needs is on disk. The harness would otherwise fork a process per core
# for its bootstraps, from a process that holds a GPU context.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
SINGLE_PROCESS = {"DISABLE_MULTIPROC": "1"}
YAML_TAG = "tag:yaml.org,2002:"  # of YAML's own types; those below `python` make objects
CODE_KEYS = ("class", "trust_remote_code")


def environment(tasks: tuple[str, ...], tasks_dir: str | None) -> dict[str, str]:
    """Return the variables to set before Hugging Face libraries are imported: offline if every task
    is local.
    """
    shipped = set(tasks) - local_task_names(tasks_dir)
    return SINGLE_PROCESS | ({} if shipped else OFFLINE)


def local_task_names(tasks_dir: str | None) -> set[str]:
    """Return the names of tasks, groups and tags defined in the folder's YAML files; none for no
    folder.

    Raises `UserError` if the folder does not exist or a file is not YAML.
    """
    if tasks_dir is None:
        return set()
    folder = Path(tasks_dir)
    if not folder.is_dir():
        raise setting_error(
            "evaluate.tasks_dir", tasks_dir, "there is no such folder", "Name a folder, or set null"
        )
    return {name for file in sorted(folder.rglob("*.yaml")) for name in _names(_read(file))}


def _read(file: Path) -> dict[str, list[str]]:
    """Return the strings of each top-level key. Nodes are only composed, so `!function` imports
    nothing.
    """
    root = _compose(file)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    return {str(key.value): _strings(value) for key, value in pairs}


def _compose(file: Path) -> yaml.Node | None:
    try:
        root: yaml.Node | None = yaml.compose(
            file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader
        )
    except (yaml.YAMLError, OSError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{file}: is no YAML that can be read ({error}). Mend the file.") from None
    return root


def _strings(node: yaml.Node) -> list[str]:
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [str(item.value) for item in nodes if isinstance(item, yaml.ScalarNode)]


def _names(keys: dict[str, list[str]]) -> set[str]:
    """Return the names that one file defines; one that is only included by others may define
    none.
    """
    if "group" in keys:
        return {*keys["group"], *keys.get("tag", [])}  # its `task` lists members defined elsewhere
    return {*keys.get("task", []), *keys.get("tag", [])}


def refuse_code(tasks_dir: str) -> None:
    """Raise `UserError` if a task file of the folder, or one that it includes, would run Python
    when it is loaded.

    That is a tag such as `!function` (the harness imports what it names), a `class`, or a data set
    that asks to be
    trusted. Templates in the files are another matter: `task_templates` keeps them in.
    """
    waiting, seen = sorted(Path(tasks_dir).rglob("*.yaml")), set[Path]()
    while waiting:
        file = waiting.pop().resolve()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        root = _compose(file)
        for code in _code(root):
            raise setting_error(
                "evaluate.tasks_dir",
                tasks_dir,
                f"{file.name} would run code ({code}), which evaluate.task_code = False forbids",
                "Read that code; if you trust it, set evaluate.task_code to true",
            )
        pairs = root.value if isinstance(root, yaml.MappingNode) else []
        included = [value for key, value in pairs if key.value == "include"]
        waiting += [file.parent / name for value in included for name in _strings(value)]


def _code(root: yaml.Node | None) -> Iterator[str]:
    """Yield what a file's nodes would run."""
    waiting, seen = [root] if root else [], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an anchor may hold itself
            continue
        seen.add(id(node))
        if not node.tag.startswith(YAML_TAG) or node.tag.startswith(f"{YAML_TAG}python"):
            yield f"{node.tag} {node.value}" if isinstance(node.value, str) else node.tag
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            yield from (key.value for key, _ in node.value if key.value in CODE_KEYS)
            waiting += [one for pair in node.value for one in pair]


def check_tasks(settings: EvaluateConfig) -> None:
    """Raise `UserError` for a task that does not exist and for a requirement that no task measures,
    before anything is trained.

    Reads definitions alone: neither the network nor data. Where every task is local and no metric
    is required there is nothing to ask the harness, whose import takes seconds.
    """
    required = [name for name in settings.require if name != HELDOUT_LOSS]
    shipped = set(settings.tasks) - local_task_names(settings.tasks_dir)
    if not shipped and not required:
        return
    manager = known_tasks(settings)
    index = {name: entry.cfg or {} for name, entry in manager.task_index.items()}
    tagged = {n: e.tags for n, e in manager.task_index.items() if n in manager.all_tags}
    measured = {task for name in settings.tasks for task in _members(name, index, tagged)}
    for name in required:
        _check_requirement(name, {task: index.get(task, {}) for task in measured - tagged.keys()})


def known_tasks(settings: EvaluateConfig) -> "TaskManager":
    """Return the harness' index of tasks: those of the folder, and where `evaluate.tasks` names
    others, those of the harness, whose thousands of files take seconds to read.

    Raises `UserError` for a task of `evaluate.tasks` that is in neither.
    """
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
    name: str, known: Collection[str], *, settings: EvaluateConfig, version: str
) -> UserError:
    """Return the error for a task that neither the folder nor the harness of a version defines."""
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
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
) -> set[str]:
    """Return a task; or a group or tag with all below it. index: definitions; tagged: the tasks of
    tags.
    """
    members, waiting = set[str](), [name]
    while waiting:
        one = waiting.pop()
        if one in members:
            continue
        members.add(one)
        listed = index.get(one, {}).get("task", []) if "group" in index.get(one, {}) else []
        entries = listed if isinstance(listed, list) else [listed]
        waiting += [
            str(e.get("task", e.get("group"))) if isinstance(e, dict) else e for e in entries
        ]
        waiting += tagged.get(one, ())
    return members


def _check_requirement(name: str, measured: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `UserError` if none of the tasks (name: definition) measures `task/metric`; one that
    lists no metrics has the harness's own.
    """
    task, _, metric = name.partition("/")
    if task not in measured:
        known = ", ".join(sorted(measured)) or "none"
        reason = f"{task!r} is not among the tasks that are run ({known})"
        change = "Add it to evaluate.tasks, or correct the requirement"
        raise setting_error("evaluate.require", name, reason, change)
    metrics = _metrics(measured[task])
    if metrics and metric not in metrics:
        reason = f"the task measures {', '.join(metrics)}"
        raise setting_error("evaluate.require", name, reason, "Name one of these")


def _metrics(definition: Mapping[str, Any]) -> list[str]:
    """Return the names that a task's metrics have in results: with the name of the filter, if it
    defines filters.
    """
    listed = [str(entry["metric"]) for entry in definition.get("metric_list") or []]
    filters = [entry["name"] for entry in definition.get("filter_list") or []] or ["none"]
    return [metric if one == "none" else f"{metric},{one}" for metric in listed for one in filters]
