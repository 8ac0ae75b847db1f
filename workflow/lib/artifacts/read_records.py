"""Reading the JSON artifacts of other stages, with an error that names the file and the field of
whatever is wrong.
"""

import itertools
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from workflow.lib.artifacts.records import Record
from workflow.lib.artifacts.training_record import Step
from workflow.lib.system.errors import UserError

RecordT = TypeVar("RecordT", bound=Record)


def read_record(path: Path, model: type[RecordT]) -> RecordT:
    """Read a JSON artifact; raises `UserError` naming the file, and the field if one is missing or
    wrong.
    """
    return _parse(_read(path), model, where=str(path))


def read_lines(path: Path, model: type[RecordT]) -> list[RecordT]:
    """Read a JSON Lines artifact, perhaps without lines; raises `UserError` naming file, line and
    field.
    """
    lines = [line for line in _read(path).split("\n") if line.strip()]
    return [_parse(line, model, where=f"{path}, line {n}") for n, line in enumerate(lines, 1)]


def read_steps(path: Path) -> list[Step]:
    """Read `metrics.jsonl`: at least one line, steps ascending; raises `UserError` naming file,
    line and field.
    """
    steps = read_lines(path, Step)
    if not steps:
        raise UserError(f"{path}: has no line, so there is no curve to draw. Run finetune again.")
    for number, (before, after) in enumerate(itertools.pairwise(steps), 2):
        if after.step <= before.step:
            raise UserError(
                f"{path}, line {number}: step = {after.step} does not follow step {before.step}. "
                "Run finetune again."
            )
    return steps


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file. Run the stage that writes it.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 ({error.reason}). Run its stage again.") from None


def _parse(text: str, model: type[RecordT], *, where: str) -> RecordT:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = "; ".join(_explain(detail) for detail in details[:5])
        more = f"; and {len(details) - 5} more" if len(details) > 5 else ""
        raise UserError(f"{where}: {problems}{more}. {model.advice}") from None


def _explain(detail: Any) -> str:
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"the field {field} is missing"
    if detail["type"] == "extra_forbidden":
        return f"the field {field} is not known"
    if detail["type"] == "json_invalid":
        return f"not valid JSON ({detail['ctx']['error']})"
    return f"{field} = {str(detail['input'])[:80]!r}: {detail['msg']}"
