"""Reading the JSON artifacts of other stages, with errors that name file and field."""

import itertools
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from workflow.lib.artifacts.records import Record
from workflow.lib.artifacts.training_record import Step
from workflow.lib.system.checksums import read_artifact, read_lines
from workflow.lib.system.errors import UserError

RecordT = TypeVar("RecordT", bound=Record)


def read_record(path: Path, model: type[RecordT]) -> RecordT:
    """Read a JSON artifact; raises `UserError` as `read_artifact`, or naming a wrong field."""
    return parsed(read_artifact(path), model, where=str(path))


def read_records(path: Path, model: type[RecordT]) -> list[RecordT]:
    """Read a JSON Lines artifact, perhaps empty; raises `UserError` naming line and field."""
    rows = enumerate(read_lines(path), 1)
    return [parsed(row, model, where=f"{path}, line {number}") for number, row in rows]


def read_steps(path: Path) -> list[Step]:
    """Read `metrics.jsonl`: one line or more, steps ascending; raises `UserError` as above."""
    steps = read_records(path, Step)
    if not steps:
        raise UserError(f"{path}: has no line, so there is no curve to draw. Run finetune again.")
    for number, (before, after) in enumerate(itertools.pairwise(steps), 2):
        if after.step <= before.step:
            raise UserError(
                f"{path}, line {number}: step = {after.step} does not follow step {before.step}. "
                "Run finetune again."
            )
    return steps


def parsed(content: dict[str, Any], model: type[RecordT], *, where: str) -> RecordT:
    """Return the record in JSON; raises `UserError` naming a wrong field."""
    try:
        return model.model_validate_json(json.dumps(content))  # in JSON mode a list may be a tuple
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = "; ".join(_explain(detail) for detail in details[:5])
        omitted = f"; and {len(details) - 5} more" if len(details) > 5 else ""
        raise UserError(f"{where}: {problems}{omitted}. {model.advice}") from None


def _explain(detail: Any) -> str:
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        first, *others = detail.get("ctx", {}).get("fields", [""])
        omitted = f" and {len(others)} others" if others else ""
        return f"the field {field}{first and '.'}{first}{omitted} is missing"
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"the field {field} is not known"
    return f"{field} = {str(detail['input'])[:80]!r}: {detail['msg']}"
