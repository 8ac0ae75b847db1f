"""What tasks will ask, counted from their files."""

import json
from pathlib import Path

from tests.support.workflow_project import REPOSITORY
from workflow.lib.evaluation.task_sizes import task_tokens
from workflow.lib.settings.config import EvaluateConfig

CHOICE = """task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
"""


def settings(folder: Path, *, kind: str = "multiple_choice", **changes: object) -> EvaluateConfig:
    """Three items of a question of 10 characters and choices of 2 and 4."""
    data = folder / "data.jsonl"
    item = json.dumps({"question": "q" * 10, "choices": ["ab", "abcd"]})
    data.write_text(f"{item}\n" * 3)
    (folder / "mine.yaml").write_text(CHOICE.format(data=data, kind=kind))
    fields = {"tasks": ("mine",), "tasks_dir": str(folder)} | changes
    return EvaluateConfig.model_validate(fields)


def test_each_choice_is_read_behind_its_question(tmp_path: Path) -> None:
    found = task_tokens(settings(tmp_path))
    assert (found.tokens, found.not_counted) == (3 * (12 + 14) // 4, ())


def test_limit_and_examples_count(tmp_path: Path) -> None:
    assert task_tokens(settings(tmp_path, task_limit=2)).tokens == 2 * 26 // 4
    assert task_tokens(settings(tmp_path, num_fewshot=3)).tokens == 4 * (3 * 26 // 4)


def test_tasks_of_other_kinds_are_named(tmp_path: Path) -> None:
    written = settings(tmp_path, kind="generate_until", tasks=("mine", "mmlu"))
    assert task_tokens(written).not_counted == ("mine", "mmlu")
    assert task_tokens(written.model_copy(update={"tasks_dir": None})).tokens == 0


def test_the_demos_task_is_counted_within_a_tenth() -> None:
    """Its 704 questions with a choice each are 27,100 tokens of the demo's tokenizer."""
    folder = REPOSITORY / "workflow" / "resources" / "tasks"
    found = task_tokens(EvaluateConfig(tasks_dir=str(folder)))
    assert abs(found.tokens / 27_100 - 1) < 0.1
