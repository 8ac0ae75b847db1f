"""The shipped rewards, and those of users' files, as functions of (prompt, answer, row)."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any

from workflow.lib.settings.rounds import RewardFunction
from workflow.lib.system.errors import UserError

Reward = Callable[..., Any]  # of prompt, answer, row and its options
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def last_number(prompt: str, answer: str, row: Mapping[str, Any], *, column: str = "answer") -> int:
    """Return 1 if the last number of the answer is the last one of the row's column."""
    wanted = _last_number(str(row[column]))
    if wanted is None:
        raise ValueError(f"the column {column!r} holds no number: {row[column]!r}")
    return int(_last_number(answer) == wanted)


def boxed(prompt: str, answer: str, row: Mapping[str, Any], *, column: str = "answer") -> int:
    r"""Return 1 if the last \boxed{...} of the answer has the content of the row's column, or of
    the last one there. Blanks do not count, and equal numbers are equal."""
    answered, wanted = _last_box(answer), str(row[column])
    inner = _last_box(wanted)
    return int(
        answered is not None and _plain(answered) == _plain(wanted if inner is None else inner)
    )


def regex(prompt: str, answer: str, row: Mapping[str, Any], *, pattern: str) -> int:
    """Return 1 if the regular expression occurs in the answer."""
    return int(re.search(pattern, answer) is not None)


def json_valid(
    prompt: str, answer: str, row: Mapping[str, Any], *, schema: Mapping[str, Any] | None = None
) -> int:
    """Return 1 if the answer is JSON, and valid by the schema."""
    try:
        value = json.loads(answer)
    except ValueError:
        return 0
    if schema is None:
        return 1
    # of Snakemake's packages
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    return int(Draft202012Validator(schema).is_valid(value))


def length(
    prompt: str, answer: str, row: Mapping[str, Any], *, at_least: int = 0, at_most: int = 0
) -> float:
    """Return 1 for an answer of these numbers of characters (at_most 0: any number), and of others
    the share of the bound that they keep to."""
    count = len(answer)
    if count < at_least:
        return count / at_least
    return at_most / count if at_most and count > at_most else 1.0


FUNCTIONS: Mapping[str, Reward] = {
    "last_number": last_number,
    "boxed": boxed,
    "regex": regex,
    "json": json_valid,
    "length": length,
}


def reward_of(function: RewardFunction) -> Reward:
    """Return a reward with its options; raises `UserError` if its file has no such function."""
    path = function.file
    if path is None:
        return partial(FUNCTIONS[function.function], **function.options)
    name = function.function.rpartition(":")[2]
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None, "settings allow .py files alone"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"{path} cannot be imported: {type(error).__name__}: {error}. Mend it; only "
            "score_answers runs again."
        ) from None
    if not callable(own := getattr(module, name, None)):
        raise UserError(f"{path} has no function {name}. Name one of the file's functions.")
    return partial(own, **function.options)


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _plain(text: str) -> str | Decimal:
    plain = re.sub(r"\s+|\$|\\[,;!]", "", text)
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return plain


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 1, start + len("\\boxed{")
    for end in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[first:end]
    return None
