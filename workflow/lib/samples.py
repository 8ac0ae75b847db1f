"""What a row means: its columns become a conversation or a plain text, by one of four formats.

`messages` is OpenAI's role and content (ShareGPT's from and value mean the same), `prompt_completion` and
`alpaca` become a conversation of one question and one answer, `text` stays text. A row that does not
fit raises `RowError`; its message is the reason in `rejects.jsonl`, and what stands before the colon is counted.
"""

from collections.abc import Callable, Collection
from typing import Any

from workflow.lib.data_config import DataColumns, Format
from workflow.lib.errors import UserError

Message = dict[str, str]
Sample = list[Message] | str

# Columns that a format cannot do without, by their keys of `data.columns`; `auto` takes the first that fits.
REQUIRED: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
# Keys of a message that would change what is trained, and that are not supported: refused, not ignored.
UNSUPPORTED_KEYS = ("tool_calls", "function_call", "weight")


class RowError(ValueError):
    """A row that cannot be used; the message is `kind` or `kind: detail`."""


def choose_format(
    found: Collection[str], *, format: str, columns: DataColumns, setting: str
) -> Format:
    """Return the format of rows with the columns `found`: the one that is set, or for `auto` the first that fits.

    Raises `UserError` that lists the columns found and expected if none fits; `setting` names the source.
    Without any column there is not one object in it: any format will do to reject its rows, each with its own reason.
    """
    candidates = [name for name in REQUIRED if format in ("auto", name)]
    if not found:
        return candidates[0]
    for candidate in candidates:
        if all(getattr(columns, key) in found for key in REQUIRED[candidate]):
            return candidate
    wanted = [f"{name} ({_wanted(name, columns)})" for name in candidates]
    raise UserError(
        f"data.format = {format!r}: {setting} has the columns {', '.join(found)}, "
        f"but expected are those of {' or '.join(wanted)}. Give the names that the file uses under "
        f"data.columns{_hint(found)}, or set data.format."
    )


def _wanted(name: Format, columns: DataColumns) -> str:
    return ", ".join(getattr(columns, key) for key in REQUIRED[name])


def _hint(columns: Collection[str]) -> str:
    """ShareGPT files call the column `conversations`."""
    return " (data.columns.messages: conversations)" if "conversations" in columns else ""


def to_sample(value: dict[str, Any], *, format: Format, columns: DataColumns) -> Sample:
    """Return a row's conversation, or its text for the format `text`.

    Raises `RowError` if a column is missing, empty, or of the wrong type.
    """
    return READ[format](value, columns)


def _messages(value: dict[str, Any], columns: DataColumns) -> Sample:
    raw = value.get(columns.messages)
    if not isinstance(raw, list):
        raise RowError(f"not a list of messages: column {columns.messages!r} is {_kind(raw)}")
    messages = [_message(item, place) for place, item in enumerate(raw, start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant turn")
    return messages


def _message(item: Any, place: int) -> Message:
    where = f"message {place}"
    if not isinstance(item, dict):
        raise RowError(f"not a message: {where} is {_kind(item)}")
    role, content = _either(item, "role", "from"), _either(item, "content", "value")
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise RowError(f"unknown role: {where} has {role!r}, known are {', '.join(ROLES)}")
    for key in UNSUPPORTED_KEYS:
        if item.get(key) not in (None, [], 1):
            raise RowError(f"unsupported key: {where} has {key!r}")
    empty_system = role == "system" and content == ""  # common in OpenAI exports, and harmless
    text = "" if empty_system else _checked(content, f"content of {where}")
    return {"role": role, "content": text}


def _either(item: dict[str, Any], key: str, other: str) -> Any:
    """Parquet unites both spellings into one type, with None for the absent one."""
    return item[key] if item.get(key) is not None else item.get(other)


def _prompt_completion(value: dict[str, Any], columns: DataColumns) -> Sample:
    return _exchange(_column(value, columns.prompt), _column(value, columns.completion))


def _alpaca(value: dict[str, Any], columns: DataColumns) -> Sample:
    question = _column(value, columns.instruction)
    if value.get(columns.input) not in (None, ""):
        question += "\n\n" + _column(value, columns.input)
    return _exchange(question, _column(value, columns.output))


def _text(value: dict[str, Any], columns: DataColumns) -> Sample:
    return _column(value, columns.text)


def _exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _column(value: dict[str, Any], name: str) -> str:
    if name not in value:
        raise RowError(f"missing column: {name!r}")
    return _checked(value[name], f"column {name!r}")


def _checked(text: Any, what: str) -> str:
    """Return `text` if it is a non-blank string that UTF-8 can hold."""
    if not isinstance(text, str):
        raise RowError(f"not text: {what} is {_kind(text)}")
    if not text.strip():
        raise RowError(f"empty: {what}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"invalid Unicode: {what} holds a lone surrogate") from None
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


READ: dict[Format, Callable[[dict[str, Any], DataColumns], Sample]] = {
    "messages": _messages,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "text": _text,
}
