"""Values of a row, of any type that JSON has: texts, JSON in texts, nulls."""

import json
from collections.abc import Callable
from typing import Any

from workflow.lib.data.reading.row_chunks import is_too_deep, parse_json, printable

EMPTY: tuple[object, ...] = (None, "", [], {})


class RowError(ValueError):
    """A row that cannot be used; the message is `kind` or `kind: detail`, printable."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


class UnwantedRowError(RowError):
    """A usable row that a setting leaves out; `data.max_rejected_share` does not count it."""


def kind(value: Any) -> str:
    """Return the name of a value's type for messages."""
    return "null" if value is None else type(value).__name__


def text_of(text: Any, what: str, *, may_be_blank: bool = False) -> str:
    """Return `text` if it is a string that UTF-8 can hold, and not blank."""
    if not isinstance(text, str):
        raise RowError(f"not text: {what} is {kind(text)}")
    if not may_be_blank and not text.strip():
        raise RowError(f"empty: {what}")
    check_unicode(text, what)
    return text


def check_unicode(value: Any, what: str) -> None:
    """Raise `RowError` if a text in the value holds a lone surrogate, which UTF-8 cannot encode."""
    if isinstance(value, str) and value.isascii():
        return
    try:
        for text in texts_of(value):
            text.encode()
    except UnicodeEncodeError:
        raise RowError(f"invalid Unicode: {what} holds a lone surrogate") from None


def check_json(value: Any, what: str) -> None:
    """Raise `RowError` for values outside of JSON in UTF-8: dates, bytes and decimals of tables,
    NaN, lone surrogates. A chat template would fail at them, or write Python's text of them."""
    try:
        check_unicode(json.dumps(value, ensure_ascii=False, allow_nan=False), what)
    except RowError:
        raise
    except (TypeError, ValueError) as error:
        raise RowError(
            f"no JSON: {what} holds a value that JSON has no form for ({error})"
        ) from None


def texts_of(value: Any) -> list[str]:
    """Return every text in `value`, keys too, in no particular order."""
    texts, pending = [], [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, dict):
            pending += item
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
    return texts


def map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Return `value` with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_texts(k, change): map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value


def without_nulls(value: Any) -> Any:
    """Drop the null fields of objects: a table gives them to every struct, as exported JSON Lines
    do. JSON text in a row keeps its nulls."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def json_value(text: str, what: str) -> Any:
    """Return the value of a JSON text; raises `RowError` if it is broken, or nested too deeply."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"broken JSON: {what}: {error}") from None
    if is_too_deep(value):
        raise RowError(f"nested too deeply: {what}")
    return value


def objects_in(text: str) -> list[dict[str, Any]] | None:
    """Return the objects of a JSON text: one or a list of them; None for other texts."""
    if not text.startswith(("[", "{", " ", "\n", "\t")) or text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        value = json_value(text, "")
    except RowError:
        return None
    items = value if isinstance(value, list) else [value]
    return items if items and all(isinstance(item, dict) for item in items) else None
