"""Chat messages as people write them, made into the one form that chat templates expect.

OpenAI's keys (role, content, tool_calls, weight) and ShareGPT's (from, value) mean the same.
Arguments of tool calls become objects, for templates write them as JSON and would quote a string
again. All other keys of a message (name, reasoning_content, ...) go to the template as they are.
What does not fit raises `RowError`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from workflow.lib.data.reading.chunks import parse_json
from workflow.lib.data.reading.row import Values, is_too_deep, printable

# A message as the template gets it: `role`, `content`, perhaps `tool_calls`, and any keys more.
Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
# Keys that are read here; a message's other keys are passed on.
READ_KEYS = {"role", "from", "content", "value", "weight", "tool_calls", "function_call"}


class RowError(ValueError):
    """A row that cannot be used; the message is `kind` or `kind: detail`, printable."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))


class FunctionCall(TypedDict):
    """The function that a message calls; its arguments are an object, or JSON text of one."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict):
    """An entry of a message's `tool_calls`, in OpenAI's form."""

    id: NotRequired[object]
    type: Literal["function"]
    function: FunctionCall


class Tool(TypedDict):
    """A tool on offer, in OpenAI's form; `function` has a name and a JSON schema of parameters."""

    type: Literal["function"]
    function: dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages as the template gets them, which of them may be trained, the tools, and arguments.

    template_kwargs: what the row gives the template besides, such as `enable_thinking`. They come
    before those of `data.template_kwargs`, which stand among the template's variables.
    """

    messages: list[Message]
    trained: list[bool]
    tools: list[Tool] | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)


def read_messages(raw: Any, *, what: str) -> tuple[list[Message], list[bool]]:
    """Return the messages of a list, or of its JSON text, and which are to be trained.

    Those are the assistant's, but for weight 0.
    """
    items = json_value(raw, what) if isinstance(raw, str) else raw
    if not isinstance(items, list):
        raise RowError(f"not a list of messages: {what} is {kind(items)}")
    messages = [_message(item, f"message {number}") for number, item in enumerate(items, start=1)]
    trained = [
        message["role"] == "assistant" and _weight(item, number) != 0
        for number, (message, item) in enumerate(zip(messages, items, strict=True), start=1)
    ]
    return messages, trained


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise RowError(f"not a message: {where} is {kind(item)}")
    given = _either(item, "role", "from")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise RowError(f"unknown role: {where} has {given!r}, known are {', '.join(ROLES)}")
    more = {k: v for k, v in item.items() if k not in READ_KEYS and v is not None}
    if more:
        check_unicode(more, where)
    content = _either(item, "content", "value")
    calls = _tool_calls(item, content if given == "function_call" else None, where)
    if calls:
        more["tool_calls"] = calls
    if given == "function_call":
        content = ""
    return {"role": role, "content": _content(content, role, bool(calls), where), **more}


def _either(item: Values, key: str, other: str) -> Any:
    """Take either spelling; a table may have both, with None for the absent one."""
    return item[key] if item.get(key) is not None else item.get(other)


def _content(content: Any, role: str, has_calls: bool, where: str) -> str:
    """Return a message's text.

    System prompts, tool results and turns that call a tool may be empty.
    """
    what = f"content of {where}"
    if isinstance(content, list) and role != "tool":
        content = "".join(_part(part, what) for part in content)
    if role == "tool" and isinstance(content, dict | list):
        check_unicode(content, where)
        return json.dumps(content, ensure_ascii=False)
    may_be_empty = role in ("system", "tool") or has_calls
    if may_be_empty and content in (None, ""):
        return ""
    return text_of(content, what, may_be_blank=may_be_empty)


def _part(part: Any, what: str) -> str:
    """Return the text of a part of a content list.

    Pictures and sounds are refused, not left out.
    """
    given = (part.get("type") or "text") if isinstance(part, dict) else kind(part)
    if given not in ("text", "input_text", "output_text"):
        raise RowError(f"not text: {what} has a part of type {given!r}")
    return text_of(part.get("text"), what, may_be_blank=True)


def _weight(item: Values, number: int) -> int:
    weight = item.get("weight")
    if weight is None:
        return 1
    if weight not in (0, 1):
        raise RowError(f"unknown weight: message {number} has {weight!r}, known are 0 and 1")
    return int(weight == 1)


def _tool_calls(item: Values, written: Any, where: str) -> list[ToolCall]:
    """Return the calls of a message.

    They are OpenAI's list, its old single `function_call`, or ShareGPT's JSON text.
    """
    calls: Any = item.get("tool_calls") or []
    if item.get("function_call") is not None:
        calls = [item["function_call"]]
    if written is not None:
        value = json_value(written, where) if isinstance(written, str) else written
        calls = value if isinstance(value, list) else [value]
    if not isinstance(calls, list):
        raise RowError(f"broken tool call: tool_calls of {where} is {kind(calls)}")
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> ToolCall:
    call = without_nulls(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"broken tool call: {where} has one without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json_value(arguments, f"arguments in {where}") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise RowError(f"broken tool call: arguments in {where} are {kind(arguments)}, no object")
    check_unicode(call, where)
    named: FunctionCall = {"name": function["name"], "arguments": arguments}
    if call.get("id") is not None:
        return {"id": call["id"], "type": "function", "function": named}
    return {"type": "function", "function": named}


def read_tools(raw: Any, *, what: str) -> list[Tool] | None:
    """Return the tools of a list, or of its JSON text; None if there are none."""
    items = json_value(raw, what) if isinstance(raw, str) and raw.strip() else raw
    if not items:
        return None
    if not isinstance(items, list):
        raise RowError(f"not a list of tools: {what} is {kind(items)}")
    return [_tool(item, what) for item in items]


def _tool(item: Any, what: str) -> Tool:
    if isinstance(item, str):
        item = json_value(item, what)
    item = without_nulls(item)
    function = item.get("function", item) if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"not a tool: {what} has one without a name")
    if isinstance(function.get("parameters"), str):
        function = {**function, "parameters": json_value(function["parameters"], what)}
    check_unicode(function, what)
    return {"type": "function", "function": function}


def without_nulls(value: Any) -> Any:
    """Drop the null fields of objects.

    A table gives every struct of a column all fields that any of them has, and so do the JSON Lines
    that are exported from one.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def json_value(text: str, what: str) -> Any:
    """Return what a JSON text in a column holds."""
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"broken JSON: {what}: {error}") from None
    if is_too_deep(value):
        raise RowError(f"nested too deeply: {what}")
    return value


def text_of(text: Any, what: str, *, may_be_blank: bool = False) -> str:
    """Return `text` if it is a string that UTF-8 can hold, and not blank."""
    if not isinstance(text, str):
        raise RowError(f"not text: {what} is {kind(text)}")
    if not may_be_blank and not text.strip():
        raise RowError(f"empty: {what}")
    check_unicode(text, what)
    return text


def check_unicode(value: Any, what: str) -> None:
    """Raise `RowError` if a text of `value` holds half a character."""
    if isinstance(value, str) and value.isascii():
        return
    try:
        for text in texts_of(value):
            text.encode()
    except UnicodeEncodeError:
        raise RowError(f"invalid Unicode: {what} holds a lone surrogate") from None


def texts_of(value: Any) -> list[str]:
    """Return every text in `value`, keys too, in no particular order."""
    texts, left = [], [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, dict):
            left += item
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
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


def kind(value: Any) -> str:
    """Name the type of a value for a reason."""
    return "null" if value is None else type(value).__name__
