"""Pydantic's validation errors as lines that name the setting, its value, the bound and the change.

Pydantic reports one error per branch of a union and adds the branch to the path; here each setting
gets one line with all allowed forms. Branches of tagged unions have a tag in angle brackets; the
keys of a section are below `<source>`."""

import datetime
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from workflow.lib.system.errors import as_yaml
from workflow.lib.system.near_names import near_names

TRAINERS = Path(__file__).parents[2] / "resources" / "trainers"  # keys of others: `importing`
SECTION_TAG = "<source>"
CHANGE = "Change it."
MISREAD = bool | int | float | datetime.date  # values that YAML makes of words without quotes
QUOTE = (
    "Put it in quotes: without them YAML reads no, off and the like as false, 1.5 as a number, and "
    "2026-01-01 as a date."
)
SHOWN_CHARS = 2000
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
HUB_REPO = r"^[A-Za-z0-9][\w.-]*/[\w.-]+$"
ARGUMENT = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"
PATTERNS = {
    NAME_PATTERN: "may have letters, digits, '.', '_' and '-', up to 64, a letter or digit first",
    HUB_REPO: "must be a hub id of the form owner/name",
    ARGUMENT: "may have letters, digits and '_', up to 64, no digit first",
}
MISSING = object()  # the value of a missing setting

# Plain words for pydantic's error types, filled with its context; its own message for others.
_BOUNDS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be finite",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be text that UTF-8 can hold",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
    "tuple_type": "must be a list",
    "dict_type": "must be a section (keys below it)",
    "model_type": "must be a section (keys below it)",
    "missing": "must be given",
    "too_short": "must have at least {min_length} entry",
}


def explain(
    model: type[BaseModel], document: Mapping[str, object], error: ValidationError
) -> list[str]:
    """Return one line `path = value: bound. Change.` per wrong setting."""
    bounds: dict[tuple[Any, ...], dict[str, None]] = {}  # the inner dict is an ordered set
    changes: dict[tuple[Any, ...], str] = {}
    lines = []
    for detail in error.errors():
        if detail["type"] == "extra_forbidden":
            lines.append(_unknown_key(model, detail["loc"]))
        elif detail["type"] == "value_error":
            prefix = (
                f"{_spell(detail['loc'])}: " if detail["loc"] else ""
            )  # none: of sections together
            lines.append(f"{prefix}{detail['ctx']['error']}.")
        elif detail["type"] == "invalid_key":
            lines.append(f"{_spell(detail['loc'])}: a key must be text. {CHANGE}")
        elif not detail["loc"]:  # pydantic gives no place for a key that is no text
            what = "a key" if detail["type"] == "string_unicode" else "it"
            lines.append(f"{what} {_bound(detail, ())}. {CHANGE}")
        elif detail["loc"][-1] == "[key]":
            lines.append(_wrong_name(document, detail))
        else:
            path = _setting_path(model, detail["loc"])
            bounds.setdefault(path, {})[_bound(detail, path)] = None
            if detail["type"] == "string_type" and isinstance(detail["input"], MISREAD):
                changes[path] = QUOTE
    return lines + [
        f"{_with_value(document, path)}: "
        + (_replaced(document, path) or f"{_either(list(broken))}. {changes.get(path, CHANGE)}")
        for path, broken in bounds.items()
    ]


def _replaced(document: Mapping[str, object], path: tuple[Any, ...]) -> str | None:
    value = _value(document, path)
    better = _trainer_keys().values.get((_spell(path), value)) if isinstance(value, str) else None
    return better and f"it is a value of other trainers. Set it to {better}."


def _wrong_name(document: Mapping[str, object], detail: ErrorDetails) -> str:
    """Return the fault of a name that is a key, such as a run's."""
    *section, name, _ = detail["loc"]
    runs = document.get("runs")
    names = runs if isinstance(runs, Mapping) else ()
    # pydantic gives False as 0, 1.5 as '1.5', and a date by its repr
    keys = [key for key in names if not isinstance(key, str)]
    name = next((key for key in keys if name in (key, str(key), repr(key))), name)
    bound = _bound(detail, detail["loc"])
    change = CHANGE if isinstance(name, str) else QUOTE
    return f"{_spell(section)}: the name {_shown(name)} {bound}. {change}"


def _shown(value: Any) -> str:
    """Spell a value, shortened."""
    try:
        text = value.isoformat() if isinstance(value, datetime.date) else as_yaml(value)
    except (RecursionError, ValueError):  # nested too deep; an integer of thousands of digits
        return "..."
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _either(bounds: list[str]) -> str:
    """Join the bounds of a union's branches: `must be a whole number or 'auto'`."""
    if "must be a number" in bounds:
        bounds = [bound for bound in bounds if bound != "must be a whole number"]
    if bounds[0].startswith("entry "):  # the first wrong entry of a list
        return bounds[0]
    others = [bound.removeprefix("must be ") for bound in bounds[1:]]
    return " or ".join([bounds[0], *(other for other in others if not bounds[0].endswith(other))])


def _setting_path(model: type[BaseModel], location: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cut off pydantic's additions below a setting: branch of a union, index, `[key]`."""
    depth = 1
    while depth < len(location) and is_section(
        _model_at(model, location[: depth - 1]), location[depth - 1]
    ):
        depth += 1
    return location[: depth + (location[0] == "runs")]


def _bound(detail: Any, path: tuple[Any, ...]) -> str:
    """Return the broken bound, with its key and entry of a list (counted from 1)."""
    words = detail["msg"]
    if detail["type"] in _BOUNDS:
        words = _BOUNDS[detail["type"]].format_map(detail.get("ctx", {}))
    if detail["type"] == "string_pattern_mismatch":
        words = PATTERNS[detail["ctx"]["pattern"]]
    below = detail["loc"][len(path) :]
    keys = below[below.index(SECTION_TAG) + 1 :] if SECTION_TAG in below else ()
    entry = [f"entry {part + 1}" for part in below if isinstance(part, int)][:1]
    return " ".join([" of ".join([*([_spell(keys)] if keys else []), *entry]), words]).strip()


def _unknown_key(model: type[BaseModel], location: tuple[Any, ...]) -> str:
    key, valid = str(location[-1]), list(_model_at(model, location[:-1]).model_fields)
    if location == ("report",):
        return f"{key}: it holds for all runs. Write it above `runs:`."
    elsewhere = [
        f"{section}.{name}"
        for section in model.model_fields
        if is_section(model, section)
        for name in _model_at(model, (section,)).model_fields
    ]
    short = key.removeprefix(f"{location[-2:][0]}_")  # `lora_r` of `lora`
    settings, reasons, _ = _trainer_keys()
    joined = "_".join(map(str, location))  # `lora_rank` of `lora: {rank: 8}`
    meant = [
        *([short] if short in valid else []),
        *([settings[joined]] if joined in settings else []),
        *(name for name in valid if len(key) > 3 and key in name),
        *(name for name in valid if key == "".join(word[0] for word in name.split("_"))),  # lr
        *(name for name in elsewhere if key == name.partition(".")[2]),
        *([settings[key]] if key in settings else []),
    ]
    misspelt = near_names(key, [name.partition(".")[2] for name in elsewhere])
    near = near_names(key, valid) or [x for x in elsewhere if x.partition(".")[2] in misspelt]
    if key in elsewhere:
        hint = "Write it in two levels: {}: {{{}: ...}}.".format(*key.split("."))
    elif key in reasons and not meant:
        hint = f"It is a key of other trainers: {reasons[key]}."
    elif meant := [*meant, *near]:
        hint = f"Did you mean {meant[0]!r}?"
    else:
        hint = f"Valid keys: {', '.join(valid)}."
    shown = [part + 1 if isinstance(part, int) else part for part in location]
    key_path = [part for part in shown if not str(part).startswith("<")]
    return f"{_spell(key_path)}: there is no such key. {hint}"


class TrainerKeys(NamedTuple):
    """Names in files of other trainers (`TRAINERS`), with their meaning here."""

    settings: dict[str, str]  # by keys of the same meaning
    reasons: dict[str, str]  # by keys without a setting
    values: dict[tuple[str, str], str]  # by the setting and their value


@cache
def _trainer_keys() -> TrainerKeys:
    meanings = TrainerKeys({}, {}, {})
    tables = [yaml.safe_load(file.read_text("utf-8")) for file in sorted(TRAINERS.glob("*.yaml"))]
    for table in tables:
        meanings.settings.update(table.get("same", {}))
        for key, word in table.get("words", {}).items():
            meanings.settings[key] = word["setting"]
            for setting_value, values in word["values"].items():
                meanings.values.update(
                    {(word["setting"], value): setting_value for value in values}
                )
        for kind in table.get("reasons", {}).values():
            meanings.reasons.update({key: why for why, keys in kind.items() for key in keys})
    for names in (meanings.settings, meanings.reasons):
        aliases = [pair for table in tables for pair in table.get("called", {}).items()]
        names.update({alias: names[name] for alias, name in aliases if name in names})
    return meanings


def is_section(model: type[BaseModel], key: Any) -> bool:
    field = model.model_fields.get(key)
    kind = field.annotation if field else None
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _model_at(model: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel]:
    """Return the section at `location`, also below branches of a union or entries of a list."""
    kind: Any = model
    for part in location:
        section = _section_in(kind)
        if section is not None and part in section.model_fields:
            kind = section.model_fields[part].annotation
    section = _section_in(kind)
    assert section is not None, f"{location} is no section"
    return section


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an annotation is, or has in a union or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _with_value(document: Mapping[str, object], path: tuple[Any, ...]) -> str:
    """Spell a setting with the user's value; alone without one."""
    value = _value(document, path)
    return _spell(path) if value is MISSING else f"{_spell(path)} = {_shown(value)}"


def _value(document: Mapping[str, object], path: tuple[Any, ...]) -> Any:
    value: Any = document
    try:
        for part in path:
            value = value[part]
    except (KeyError, IndexError, TypeError):
        return MISSING
    return value


def _spell(path: Sequence[Any]) -> str:
    return ".".join(str(part) for part in path)
