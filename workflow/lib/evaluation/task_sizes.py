"""How much the tasks of an evaluation will ask, from their files alone, without the harness.

Only tasks of `evaluate.tasks_dir` are read that ask for a choice and whose data lie in a JSON lines
file: every choice of every item is read once, behind the question. Of all others nothing is known
before the harness has loaded them.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from workflow.lib.planning.timing.evaluation_time import TaskTokens
from workflow.lib.settings.config import EvaluateConfig

# Of an English question in the demo's tokenizer 3.8 (4,000 tokens), in SmolLM2's 4.0 (49,152).
CHARACTERS_PER_TOKEN = 4
FIELD = re.compile(r"\{\{\s*(\w+)\s*\}\}")
UNREADABLE = (yaml.YAMLError, OSError, ValueError, KeyError, TypeError, AttributeError)


def task_tokens(settings: EvaluateConfig) -> TaskTokens:
    """Return the tokens that the tasks of the settings will ask, and the tasks that cannot be
    counted.
    """
    if settings.tasks_dir is None:
        return TaskTokens(not_counted=settings.tasks)
    definitions = dict(_definitions(Path(settings.tasks_dir)))
    counted: dict[str, int] = {}
    for name in settings.tasks:
        try:
            counted[name] = _tokens(definitions[name], limit=settings.task_limit)
        except UNREADABLE:  # whether the harness can read it, `check_tasks` says
            continue
    left = tuple(name for name in settings.tasks if name not in counted)
    return TaskTokens((1 + settings.num_fewshot) * sum(counted.values()), left)


def _definitions(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(folder.rglob("*.yaml")):
        try:
            definition = yaml.safe_load(path.read_text(encoding="utf-8"))
            yield str(definition["task"]), definition
        except UNREADABLE:
            continue


def _tokens(definition: dict[str, Any], *, limit: int | None) -> int:
    """Return the tokens of all choices of all items; raises one of `UNREADABLE` for a task of
    another kind.
    """
    if (definition["dataset_path"], definition["output_type"]) != ("json", "multiple_choice"):
        raise ValueError
    files = definition["dataset_kwargs"]["data_files"]
    text, choices = FIELD.findall(definition["doc_to_text"]), definition["doc_to_choice"]
    (listed,) = FIELD.findall(choices)
    with Path(files[definition["test_split"]]).open(encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines if line.strip()][:limit]
    return (
        sum(
            sum(len(item[name]) for name in text) + len(choice)
            for item in items
            for choice in item[listed]
        )
        // CHARACTERS_PER_TOKEN
    )
