"""From a row's columns to a conversation, a text or token ids, by one of five formats.

`messages` is a conversation, `prompt_completion` one whose completion alone is trained (both texts,
or lists of messages), `alpaca` a question and its answer, `tokens` ids with labels or a mask,
`text` plain text. Any other row raises `RowError`; its message is the reason in `rejects.jsonl`,
and the part before the colon is counted."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from workflow.lib.data.encoding.chat_messages import (
    BEGIN_OF_REASONING,
    Conversation,
    as_prefix,
    read_content,
    read_messages,
    whole_turns,
    without_tags,
)
from workflow.lib.data.encoding.keys_read import (
    FLAGS,
    REASONING_COLUMNS,
    REASONING_KEYS,
    KeyAudit,
    KeySchema,
    KeyUsage,
    check_label,
    row_weight,
)
from workflow.lib.data.encoding.message_forms import (
    ROLE_KEYS,
    ROLES,
    Message,
    question_of,
    read_transcript,
)
from workflow.lib.data.encoding.row_columns import (
    REQUIRED,
    TARGETS,
    WITHOUT_TEMPLATE,
    system_columns,
    tools_columns,
)
from workflow.lib.data.encoding.row_values import (
    EMPTY,
    RowError,
    check_json,
    json_value,
    kind,
    objects_in,
    text_of,
    without_nulls,
)
from workflow.lib.data.encoding.token_rows import TokenRow, read_tokens
from workflow.lib.data.encoding.tool_calls import SCHEMAS, read_calls, read_tools
from workflow.lib.data.reading.row_chunks import Values
from workflow.lib.settings.data import DataColumns, Format

# The row's arguments of the chat template: an object of them, and columns with their names.
ARGUMENTS_COLUMN = "chat_template_kwargs"
SWITCHES = {"enable_thinking": bool, "reasoning_effort": str}
THINKING = "thinking"  # an argument if it is true or false, a reasoning if it is text
SWITCHED = {"on", "off"}  # values of a column `reasoning` that are no reasoning
# Columns that a format reads beside those that it needs, by their keys of `data.columns`.
ALSO_READ: dict[Format, tuple[str, ...]] = {
    "alpaca": ("input",),
    "tokens": TARGETS,
    "pairs": ("prompt", "preference", "score_chosen", "score_rejected"),
}
BEGIN_OF_MESSAGES = re.compile(r"""\s*\[?\s*\{\s*['"](?:role|content|from|value)['"]\s*:""")
ROLE_IN_TEXT = re.compile(rf"""['"](?:role|from)['"]\s*:\s*['"](?:{"|".join(ROLES)})['"]""")
WITHOUT_REASONING: tuple[Format, ...] = ("text", "pairs", "ranked")  # without a message for it


Unweighted = Conversation | TokenRow | str


class Weighted(NamedTuple):
    """A row's sample, with a weight in the loss other than 1."""

    sample: Unweighted
    weight: float


Sample = Unweighted | Weighted


def plain(sample: Sample) -> Unweighted:
    return sample.sample if isinstance(sample, Weighted) else sample


class RowParts(NamedTuple):
    """The parts of a row for a format: its columns, their names, the account of keys."""

    value: Values
    columns: DataColumns
    keys: KeyAudit


def optional_columns(format: Format, columns: DataColumns) -> set[str]:
    """Return the columns of a conversation that few rows have."""
    names = {*system_columns(columns), *tools_columns(columns), columns.history, *SWITCHES}
    reasonings = set() if format in WITHOUT_REASONING else {*REASONING_COLUMNS}
    return names | reasonings | {ARGUMENTS_COLUMN}


@cache
def row_schema(format: Format, columns: DataColumns) -> KeySchema:
    """Return the columns that a format reads, and its flags."""
    names = {getattr(columns, key) for key in (*REQUIRED[format], *ALSO_READ.get(format, ()))}
    padding = {"attention_mask", "position_ids"}
    names |= padding if format == "tokens" else optional_columns(format, columns)
    names |= set() if columns.label is None else {columns.label}
    return KeySchema("", frozenset(names), flags=frozenset({*FLAGS, columns.weight}))


def to_sample(
    value: Values, *, format: Format, columns: DataColumns, keys: KeyAudit | None = None
) -> Sample:
    """Return a row's conversation, token ids, or text, with its weight if that is not 1. keys: the
    account of keys. Raises `RowError` if a column is missing, empty, or of the wrong type, or a key
    that is not read changes what should be trained."""
    keys = keys or KeyAudit()
    value, usage = keys.check(row_schema(format, columns), value, "the row")
    check_label(usage, value, label=columns.label)
    weight = row_weight(usage, value, column=columns.weight)
    sample = READ[format](row_parts(value, usage, format=format, columns=columns, keys=keys))
    return sample if weight == 1 else Weighted(sample, weight)


def row_parts(
    value: Values, usage: KeyUsage, *, format: Format, columns: DataColumns, keys: KeyAudit
) -> RowParts:
    """Return the parts of a row; its tools may stand inside of another column."""
    names = tools_columns(columns)
    is_chat = usage.unread and format not in WITHOUT_TEMPLATE
    if is_chat and all(value.get(name) in EMPTY for name in names):
        nested = list(_nested({name: value.get(name) for name in usage.unread}, names))
        if any(tools != nested[0] for tools in nested):
            raise RowError(
                f"two lists of tools: unread columns of the row hold {len(nested)}; give it a "
                f"column {columns.tools!r}, or leave one out (data.leave_out)"
            )
        if nested:
            value = {**value, columns.tools: nested[0]}
    return RowParts(value, columns, keys)


def _nested(value: Any, names: Collection[str], key: str = "") -> Iterator[list[Any]]:
    """Yield the lists of tools inside of objects or of JSON text of them: those under these keys,
    and under any other key those with schemas. key: of the value."""
    if isinstance(value, str):
        is_json = "{" in value and (
            key in names or any(f'"{name}"' in value for name in (*names, *SCHEMAS))
        )
        value = objects_in(value) if is_json else None
    if isinstance(value, list):
        if value and _are_calls(value) and (key in names or all(map(_has_schema, value))):
            yield value
        else:
            for item in value:
                yield from _nested(item, names)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _nested(item, names, name)


def _has_schema(tool: dict[str, Any]) -> bool:
    """Tell whether a tool has a JSON schema of an object, which a call's arguments are not."""
    function = tool.get("function", tool)
    schemas = [function.get(key) for key in SCHEMAS] if isinstance(function, dict) else []
    return any(isinstance(schema, dict) and "properties" in schema for schema in schemas)


def _messages(row: RowParts) -> Unweighted:
    name = row.columns.messages
    if name not in row.value:
        raise RowError(f"missing column: {name!r}")
    messages, weights = read_messages(row.value[name], row.keys, what=f"column {name!r}")
    if row.value.get(row.columns.history) not in EMPTY:
        raise _unused_column(row.columns.history, "messages", "put it into the messages")
    prompt = row.value.get(row.columns.prompt)
    if prompt not in EMPTY:
        check_prompt_is_in(messages, prompt, row.columns)
    return _conversation(messages, weights, row)


def _unused_column(name: str, format: str, change: str) -> RowError:
    return RowError(
        f"{name} beside {format}: column {name!r} has no place in this format; {change}, or leave "
        f"it out (data.leave_out: [{name}])"
    )


def check_prompt_is_in(messages: list[Message], prompt: object, columns: DataColumns) -> None:
    """Raise `RowError` if a text of the prompt's column stands in no message."""
    items = prompt if isinstance(prompt, list) else [prompt]
    texts = [item.get("content") if isinstance(item, dict) else item for item in items]
    contents = [message["content"] for message in messages]
    for text in texts:
        if isinstance(text, str) and not any(text.strip() in content for content in contents):
            raise RowError(
                f"prompt beside messages: column {columns.prompt!r} holds a text that is in no "
                f"message; leave it out (data.leave_out: [{columns.prompt}]), or put it into the "
                "messages"
            )


def _conversation(messages: list[Message], weights: list[float], row: RowParts) -> Conversation:
    check_has_answer(messages, weights)
    _add_reasoning(messages, row)
    return whole_conversation(messages, weights, row)


def check_has_answer(messages: list[Message], weights: list[float]) -> None:
    """Raise `RowError` without an assistant's turn, or if none of them may be trained."""
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("no assistant turn")
    if not any(weights):
        raise RowError("no trained token: no assistant turn may be trained, as flags say")


def whole_conversation(
    messages: list[Message], weights: list[float], row: RowParts
) -> Conversation:
    """Return messages with the row's system text, tools and template arguments."""
    system = _one_column(row, system_columns(row.columns), "system text")
    if system is not None:
        system = read_content(system, "system", "the system text", row.keys, may_be_empty=True)
        if system.strip():
            messages, weights = _with_system(messages, weights, system)
    tools = read_tools(_raw_tools(row), row.keys, what=f"column {row.columns.tools!r}")
    conversation = _weighted_conversation(messages, weights)
    return replace(conversation, tools=tools, template_kwargs=_template_kwargs(row.value))


def _weighted_conversation(messages: list[Message], weights: list[float]) -> Conversation:
    messages, weights, prefills = whole_turns(messages, weights)
    trained = [weight > 0 for weight in weights]
    own_weights = None if weights == trained else weights
    return Conversation(messages, trained, weights=own_weights, prefills=prefills)


def _raw_tools(row: RowParts) -> Any:
    return _one_column(row, tools_columns(row.columns), "list of tools")


def _one_column(row: RowParts, names: tuple[str, ...], what: str) -> Any:
    filled = [name for name in names if row.value.get(name) not in EMPTY]
    if len(filled) > 1:
        raise RowError(
            f"two columns for one {what}: {filled[0]!r} and {filled[1]!r}; leave one out "
            f"(data.leave_out: [{filled[1]}])"
        )
    return row.value[filled[0]] if filled else None


def _with_system(
    messages: list[Message], weights: list[float], system: str
) -> tuple[list[Message], list[float]]:
    first: Message = {"role": "system", "content": system}
    if not messages or messages[0]["role"] != "system":
        return [first, *messages], [0.0, *weights]
    if messages[0]["content"].strip() not in ("", system.strip()):
        raise RowError(
            "two system texts: a column of the row has one and message 1 has another; leave the "
            "column out (data.leave_out), or that message"
        )
    return [first, *messages[1:]], weights


def _add_reasoning(messages: list[Message], row: RowParts) -> None:
    """Give the last message the reasoning of a column, unless it has it already."""
    for name in REASONING_COLUMNS:
        reasoning = row.value.get(name)
        if reasoning in EMPTY or (name == THINKING and isinstance(reasoning, bool)):
            continue
        if isinstance(reasoning, bool) or str(reasoning).strip().lower() in SWITCHED:
            row.keys.count(row_schema("messages", row.columns), name)
            continue
        if not isinstance(reasoning, str):
            raise RowError(
                f"not text: column {name!r} is {kind(reasoning)}; leave it out "
                f"(data.leave_out: [{name}])"
            )
        last, text = messages[-1], without_tags(reasoning).strip()
        is_new = text not in last["content"]
        has_another = not last.keys().isdisjoint(REASONING_KEYS) or (
            is_new and last["content"].lstrip().startswith(BEGIN_OF_REASONING)
        )
        if last["role"] != "assistant" or has_another:
            raise RowError(
                f"two reasonings: column {name!r} has one, and so has the last turn, or it is no "
                f"assistant's; leave the column out (data.leave_out: [{name}])"
            )
        if is_new:
            key = row.keys.reasoning_key(REASONING_KEYS[0])
            last[key] = without_tags(text_of(reasoning, f"column {name!r}"))


def _template_kwargs(value: Values) -> dict[str, object]:
    raw = value.get(ARGUMENTS_COLUMN)
    if isinstance(raw, str) and raw.strip():
        raw = json_value(raw, f"column {ARGUMENTS_COLUMN!r}")
    raw = raw or {}
    if not isinstance(raw, dict):
        raise RowError(f"not an object: column {ARGUMENTS_COLUMN!r} is {kind(raw)}")
    columns = {k: value[k] for k in SWITCHES if value.get(k) is not None}
    if isinstance(value.get(THINKING), bool):
        columns[THINKING] = value[THINKING]
    for name, setting in columns.items():
        expected_type = SWITCHES.get(name, bool)
        if not isinstance(setting, expected_type):
            raise RowError(f"not {expected_type.__name__}: column {name!r} is {kind(setting)}")
    arguments = {**columns, **{k: without_nulls(v) for k, v in raw.items() if v not in EMPTY}}
    if arguments:
        check_json(arguments, "an argument of the chat template")
    return arguments


def _prompt_completion(row: RowParts) -> Unweighted:
    history, _ = read_history(row)
    columns = row.columns
    texts = [_required(row.value, name) for name in (columns.prompt, columns.completion)]
    prompt, _ = read_turns(row, texts[0], f"column {columns.prompt!r}", role="user")
    answer, what = answer_behind(row, texts[1]), f"column {columns.completion!r}"
    completion, weights = read_turns(row, answer, what, role="assistant")
    weights = [0.0] * (len(history) + len(prompt)) + weights
    return _conversation([*history, *as_prefix(prompt, completion), *completion], weights, row)


def read_turns(
    row: RowParts, value: Any, what: str, *, role: str
) -> tuple[list[Message], list[float]]:
    """Return the messages of a value; a text is one message of `role`, but a transcript that ends
    with a question is messages, JSON text of objects with roles too, and with names, where there
    are tools, calls."""
    question = question_of(value) if role == "user" else None
    if question is not None:
        return read_transcript(question, what)
    items = objects_in(value) if isinstance(value, str) else value
    if isinstance(items, dict):
        items = [items]
    if isinstance(items, list) and items:
        _check_is_no_tree(items, what)
        if all(
            isinstance(item, dict) and any(item.get(key) is not None for key in ROLE_KEYS)
            for item in items
        ):
            return read_messages(items, row.keys, what=what)
        may_call = role == "assistant" and (value is items or _raw_tools(row) is not None)
        if may_call and _are_calls(items):
            calls = read_calls(value, what, row.keys)
            return [{"role": role, "content": "", "tool_calls": calls}], [1.0]
    if isinstance(value, list):
        return read_messages(value, row.keys, what=what)
    if items is None and isinstance(value, str):
        _check_is_no_broken_text_of_messages(value, what)
    return [{"role": role, "content": text_of(value, what)}], [float(role == "assistant")]


def _check_is_no_broken_text_of_messages(text: str, what: str) -> None:
    """Raise `RowError` at Python's text of messages, as `to_csv` of pandas writes them."""
    if BEGIN_OF_MESSAGES.match(text) and ROLE_IN_TEXT.search(text):
        raise RowError(
            f"broken JSON: {what} holds text of messages that is no JSON; write JSON, or a Parquet "
            "file"
        )


def answer_behind(row: RowParts, answer: Any) -> Any:
    """Return an answer; of a transcript's question it is a text without the blanks around it."""
    is_text = isinstance(answer, str) and question_of(row.value.get(row.columns.prompt)) is not None
    return answer.strip() if is_text else answer


def _are_calls(items: list[Any]) -> bool:
    return all(
        isinstance(item, dict) and ("function" in item or isinstance(item.get("name"), str))
        for item in items
    )


def _check_is_no_tree(items: list[Any], what: str) -> None:
    if any(isinstance(item, dict) and item.get("replies") for item in items):
        raise RowError(
            f"a tree of messages: {what} holds replies; write one row for each path from "
            "the first message to a last one"
        )


def read_history(row: RowParts) -> tuple[list[Message], list[float]]:
    """Return the messages of the history column and their weights; empty without one."""
    name = row.columns.history
    if row.value.get(name) in EMPTY:
        return [], []
    return read_messages(row.value[name], row.keys, what=f"column {name!r}")


def _alpaca(row: RowParts) -> Unweighted:
    value, columns = row.value, row.columns
    history, weights = read_history(row)
    question = _column(value, columns.instruction)
    if value.get(columns.input) not in (None, ""):
        question += "\n\n" + _column(value, columns.input)
    answer = _column(value, columns.output)
    messages = [
        *history,
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return _conversation(messages, [*weights, 0.0, 1.0], row)


def _text(row: RowParts) -> Unweighted:
    for name in optional_columns("text", row.columns):
        if row.value.get(name) not in EMPTY:
            raise _unused_column(name, "text", "write it into the text")
    return _column(row.value, row.columns.text)


def _column(value: Values, name: str) -> str:
    return text_of(_required(value, name), f"column {name!r}")


def _required(value: Values, name: str) -> Any:
    if name not in value:
        raise RowError(f"missing column: {name!r}")
    return value[name]


READ: dict[Format, Callable[[RowParts], Unweighted]] = {
    "messages": _messages,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "tokens": lambda row: read_tokens(row.value, row.columns),
    "text": _text,
}
