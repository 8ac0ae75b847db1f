"""Which task names a folder of YAML files defines, read without the harness.

The stage must know before it imports anything of Hugging Face whether the tasks need the hub: the
libraries read their offline variables at import. Kinds of names as in lm_eval 0.4.13 (`tasks/_index.py`).
"""

from pathlib import Path

import yaml

from workflow.lib.errors import UserError, setting_error

# Everything the evaluation needs is on disk. The harness would otherwise fork a process per core for
# its bootstraps, from a process that holds a GPU context.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
SINGLE_PROCESS = {"DISABLE_MULTIPROC": "1"}


def environment(tasks: tuple[str, ...], tasks_dir: str | None) -> dict[str, str]:
    """Return the variables to set before Hugging Face libraries are imported: offline if every task is local."""
    shipped = set(tasks) - local_task_names(tasks_dir)
    return SINGLE_PROCESS | ({} if shipped else OFFLINE)


def local_task_names(tasks_dir: str | None) -> set[str]:
    """Return the names of tasks, groups and tags defined in the folder's YAML files; none for no folder.

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
    """Return the strings of each top-level key. Nodes are only composed, so `!function` imports nothing."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: is no YAML that can be read ({error}). Mend the file.") from None
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    return {str(key.value): _strings(value) for key, value in pairs}


def _strings(node: yaml.Node) -> list[str]:
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [str(item.value) for item in nodes if isinstance(item, yaml.ScalarNode)]


def _names(keys: dict[str, list[str]]) -> set[str]:
    """Return the names that one file defines; one that is only included by others may define none."""
    if "group" in keys:
        return {*keys["group"], *keys.get("tag", [])}  # its `task` lists members defined elsewhere
    return {*keys.get("task", []), *keys.get("tag", [])}
