"""What a row means: columns to a conversation, a text or token ids, by one of five formats.

`messages` is a conversation, `prompt_completion` one whose completion alone is trained (both texts,
or lists of messages), `alpaca` a question and its answer, `tokens` ids with labels or a mask,
`text` stays text. A row that does not fit raises `RowError`; its message is the reason in
`rejects.jsonl`, and what stands before the colon is counted.
"""

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from workflow.lib.data.encoding.chat_messages import (
    Conversation,
    Message,
    RowError,
    json_value,
    kind,
    read_messages,
    read_tools,
    text_of,
)
from workflow.lib.data.reading.row import Values, printable
from workflow.lib.settings.data import DataColumns, Format
from workflow.lib.system.errors import UserError

IGNORED_LABEL = -100  # of a token that is not trained, as in Transformers
MESSAGES_COLUMN = DataColumns().messages
SHAREGPT_COLUMN = "conversations"  # taken for `messages` where data.columns says nothing else

# Columns that a format cannot do without, by their keys of `data.columns`; `auto` takes the first
# that fits.
REQUIRED: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "tokens": ("input_ids",),
    "text": ("text",),
}
# The row's arguments of the chat template: an object of them, and columns named as one of them.
ARGUMENTS_COLUMN = "chat_template_kwargs"
SWITCHES = {"enable_thinking": bool, "thinking": bool, "reasoning_effort": str}
# `auto` takes token ids only if they come with what is trained: many tokenized datasets keep the
# text beside them.
TARGETS = ("labels", "loss_mask")
WITHOUT_TEMPLATE: frozenset[Format] = frozenset({"tokens", "text"})


@dataclass(frozen=True)
class TokenRow:
    """Ready token ids, and whether each is trained; None = the row does not say."""

    ids: list[int]
    trained: list[bool] | None


Sample = Conversation | TokenRow | str


def choose_format(
    present: Collection[str], *, format: str, columns: DataColumns, setting: str
) -> Format:
    """Return the format of rows with these columns: the one set, or the first that fits.

    present: the columns; `auto` means the first format that fits them. Raises `UserError` that
    lists the columns present and expected if none fits; `setting` names the source. Without any
    column there is not one object in it: any format will do to reject its rows, each with its own
    reason.
    """
    candidates = [name for name in REQUIRED if format in ("auto", name)]
    if not present:
        return candidates[0]
    for candidate in candidates:
        if _fits(candidate, present, columns, is_set=format != "auto"):
            return candidate
    wanted = [f"{name} ({_wanted(name, columns)})" for name in candidates]
    raise UserError(
        f"data.format = {format!r}: {setting} has the columns {_listed(present)}, but expected are "
        f"those of {' or '.join(wanted)}. {_misspelt(present, columns)}Give the names that the "
        "file uses under data.columns, or set data.format."
    )


def _listed(names: Collection[str]) -> str:
    """Return names in quotes, as a blank at an end would else be overlooked."""
    return ", ".join(printable(f"'{name}'") for name in names)


def _misspelt(present: Collection[str], columns: DataColumns) -> str:
    """Say which columns that the user named are not there, each with the nearest one that is."""
    parts = []
    for key in DataColumns.model_fields:
        name = getattr(columns, key)
        if name not in present and name != getattr(DataColumns(), key):
            near = difflib.get_close_matches(name, present, n=1)
            hint = f"; did you mean {_listed(near)}? " if near else ". "
            parts.append(f"data.columns.{key} = {name!r} is none of them{hint}")
    return "".join(parts)


def _fits(name: Format, present: Collection[str], columns: DataColumns, *, is_set: bool) -> bool:
    if name == "messages" and _messages_column(present, columns) in present:
        return True
    has_targets = any(getattr(columns, key) in present for key in TARGETS)
    needed = all(getattr(columns, key) in present for key in REQUIRED[name])
    return needed and (name != "tokens" or has_targets or is_set)


def _messages_column(present: Collection[str], columns: DataColumns) -> str:
    is_default = columns.messages == MESSAGES_COLUMN
    missing = columns.messages not in present
    return (
        SHAREGPT_COLUMN
        if is_default and missing and SHAREGPT_COLUMN in present
        else columns.messages
    )


def _wanted(name: Format, columns: DataColumns) -> str:
    wanted = ", ".join(getattr(columns, key) for key in REQUIRED[name])
    targets = " or ".join(getattr(columns, key) for key in TARGETS)
    return f"{wanted} with {targets}" if name == "tokens" else wanted


def to_sample(value: Values, *, format: Format, columns: DataColumns) -> Sample:
    """Return a row's conversation, token ids, or text.

    Raises `RowError` if a column is missing, empty, or of the wrong type.
    """
    return READ[format](value, columns)


def _messages(value: Values, columns: DataColumns) -> Sample:
    name = _messages_column(value, columns)
    if name not in value:
        raise RowError(f"missing column: {name!r}")
    messages, trained = read_messages(value.get(name), what=f"column {name!r}")
    return _conversation(messages, trained, value, columns)


def _conversation(
    messages: list[Message], trained: list[bool], value: Values, columns: DataColumns
) -> Conversation:
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant turn")
    if not any(trained):
        raise RowError(
            "no trained token: no assistant turn that may be trained has a weight above 0"
        )
    tools = read_tools(value.get(columns.tools), what=f"column {columns.tools!r}")
    return Conversation(messages, trained, tools, _template_kwargs(value))


def _template_kwargs(value: Values) -> dict[str, object]:
    """Return the row's own arguments of the chat template."""
    given = value.get(ARGUMENTS_COLUMN)
    if isinstance(given, str) and given.strip():
        given = json_value(given, f"column {ARGUMENTS_COLUMN!r}")
    given = given or {}
    if not isinstance(given, dict):
        raise RowError(f"not an object: column {ARGUMENTS_COLUMN!r} is {kind(given)}")
    columns = {k: value[k] for k, t in SWITCHES.items() if isinstance(value.get(k), t)}
    return {**columns, **{k: v for k, v in given.items() if v is not None}}


def _prompt_completion(value: Values, columns: DataColumns) -> Sample:
    prompt, _ = _turns(value, columns.prompt, role="user")
    completion, trained = _turns(value, columns.completion, role="assistant")
    trained = [False] * len(prompt) + trained
    return _conversation([*prompt, *completion], trained, value, columns)


def _turns(value: Values, name: str, *, role: str) -> tuple[list[Message], list[bool]]:
    """Return a column's messages; a text is one message of `role`."""
    if isinstance(value.get(name), list):
        return read_messages(value[name], what=f"column {name!r}")
    return [{"role": role, "content": _column(value, name)}], [role == "assistant"]


def _alpaca(value: Values, columns: DataColumns) -> Sample:
    question = _column(value, columns.instruction)
    if value.get(columns.input) not in (None, ""):
        question += "\n\n" + _column(value, columns.input)
    answer = _column(value, columns.output)
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return Conversation(messages, [False, True], template_kwargs=_template_kwargs(value))


def _text(value: Values, columns: DataColumns) -> Sample:
    return _column(value, columns.text)


def _column(value: Values, name: str) -> str:
    if name not in value:
        raise RowError(f"missing column: {name!r}")
    return text_of(value[name], f"column {name!r}")


def _tokens(value: Values, columns: DataColumns) -> Sample:
    """Take the ids that `attention_mask` does not call padding, and what is trained of them."""
    ids = _integers(value, columns.input_ids)
    trained = _targets(value, ids, columns)
    if value.get("attention_mask") is not None:
        real = _flags(value, "attention_mask", ids)
        trained = trained and [t for t, r in zip(trained, real, strict=True) if r]
        ids = [i for i, r in zip(ids, real, strict=True) if r]
    if not ids:
        raise RowError(f"empty: column {columns.input_ids!r}")
    return TokenRow(ids, trained)


def _targets(value: Values, ids: list[int], columns: DataColumns) -> list[bool] | None:
    if value.get(columns.labels) is not None:
        labels = _same_length(_integers(value, columns.labels), ids, columns.labels)
        for position, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label not in (IGNORED_LABEL, token):
                raise RowError(
                    f"labels differ from tokens: place {position} has label {label}, token "
                    f"{token}; a label is its own token (not the next one), or {IGNORED_LABEL}"
                )
        return [label != IGNORED_LABEL for label in labels]
    if value.get(columns.loss_mask) is not None:
        return _flags(value, columns.loss_mask, ids)
    return None


def _integers(value: Values, name: str) -> list[int]:
    numbers = value.get(name)
    if name not in value:
        raise RowError(f"missing column: {name!r}")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise RowError(f"not a list of whole numbers: column {name!r}")
    return numbers


def _flags(value: Values, name: str, ids: list[int]) -> list[bool]:
    flags = value[name]
    if not isinstance(flags, list) or not all(flag in (0, 1) for flag in flags):
        raise RowError(f"not a list of 0 and 1: column {name!r} is {kind(flags)}")
    return [bool(flag) for flag in _same_length(flags, ids, name)]


def _same_length(numbers: list[int], ids: list[int], name: str) -> list[int]:
    if len(numbers) != len(ids):
        raise RowError(f"unequal lengths: {len(ids)} token ids, {len(numbers)} in column {name!r}")
    return numbers


READ: dict[Format, Callable[[Values, DataColumns], Sample]] = {
    "messages": _messages,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "tokens": _tokens,
    "text": _text,
}
