"""Texts of a conversation that the chat template has to write: searched, or marked.

A text is searched in the rendered document as it is, or as JSON escapes it. The template may trim
or rewrite it: if the search fails, a copy of the conversation decides, in which each text has marks
at both of its ends. One such copy proves that a template writes all conversations of its shape
(roles, keys, empty texts)."""

import json
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from workflow.lib.data.encoding.chat_messages import (
    BEGIN_OF_REASONING,
    END_OF_REASONING,
    Conversation,
)
from workflow.lib.data.encoding.keys_read import REASONING_KEYS
from workflow.lib.data.encoding.message_forms import Message
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.safe_encoder import shared_length
from workflow.lib.data.encoding.tool_calls import Tool, ToolCall
from workflow.lib.settings.data import TextKind

KINDS: dict[str, TextKind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "tool": "results",
}
# Keys of a JSON schema; an object under one is an argument of this name (xLAM).
SCHEMA_KEYS = {"type", "required", "title", "description", "strict", "$schema", "default", "format"}
FIRST_NUMBER = 7_700_000  # marks for numbers have seven digits


NAMES: dict[TextKind, str] = {
    "user": "the {what} text of message {number}",
    "results": "the result of message {number}",
    "assistant": "the assistant text of message {number}",
    "reasoning": "the reasoning of message {number}",
    "calls": "the call of {what!r} in message {number}",
    "tools": "the tool {what!r}, or an argument of it",
}


class TextOrigin(NamedTuple):
    """The owner of a text. message: its number, -1 for a tool. name: of the role, or function."""

    kind: TextKind
    message: int
    name: str = ""


class Text(NamedTuple):
    """A text that a document must hold; parts: texts that may replace it."""

    origin: TextOrigin
    value: str
    parts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The text in words, for messages."""
        kind, message, owner = self.origin
        return NAMES.get(kind, NAMES["user"]).format(what=owner, number=message + 1)

    def stands_in(self, document: str) -> bool:
        """Tell whether a rendered document holds the text, as it is or escaped in JSON, or all its
        parts."""
        return _stands(self.value, document) or (
            bool(self.parts) and all(_stands(part, document) for part in self.parts)
        )


def _stands(value: str, document: str) -> bool:
    return value in document or json.dumps(value, ensure_ascii=False)[1:-1] in document


class _Visitor:
    def __init__(self) -> None:
        self.texts: list[Text] = []

    def _add(self, origin: TextOrigin, value: str, *parts: str) -> None:
        stripped = tuple(part.strip() for part in parts if part.strip())
        self.texts.append(Text(origin, value, stripped))


class Collector(_Visitor):
    """Collects texts, names of functions, tools on offer and arguments of calls, as they are."""

    def text(self, origin: TextOrigin, text: str) -> str:
        self._add(origin, text.strip())
        return text

    def word(self, origin: TextOrigin, word: str) -> str:
        self._add(origin, word)
        return word

    def schema(self, origin: TextOrigin, function: dict[str, Any]) -> dict[str, Any]:
        described = function.get("description")
        parts = [function["name"], described if isinstance(described, str) else ""]
        schema_json = json.dumps(function, ensure_ascii=False)
        self._add(origin, schema_json, *parts, *argument_names(function))
        return function

    def arguments(self, origin: TextOrigin, arguments: Any) -> Any:
        arguments_json = json.dumps(arguments, ensure_ascii=False)
        leaves: list[str] = []
        _map_leaves(arguments, leaves.append, lambda n: leaves.append(str(n)), leaves.append)
        self._add(origin, arguments_json, *leaves)
        return arguments


class Marker(_Visitor):
    """Puts marks into every text, and collects them as texts to be searched."""

    def text(self, origin: TextOrigin, text: str) -> str:
        number = len(self.texts)
        begin, end = f"q{number:05d}b", f"q{number:05d}e"
        self._add(origin, begin)
        self._add(origin, end)
        return begin + text + end

    def word(self, origin: TextOrigin, word: str) -> str:
        mark = f"Q{len(self.texts):05d}w"
        self._add(origin, mark)
        return word + mark

    def schema(self, origin: TextOrigin, function: dict[str, Any]) -> dict[str, Any]:
        marked = {**function, "name": self.word(origin, function["name"])}
        if isinstance(marked.get("description"), str) and marked["description"].strip():
            marked["description"] = self.text(origin, marked["description"])
        names = {name: self.word(origin, name) for name in argument_names(function)}
        if names:
            marked["parameters"] = _with_names(function["parameters"], names)
        return marked

    def arguments(self, origin: TextOrigin, arguments: Any) -> Any:
        def number(value: float) -> float:
            mark = FIRST_NUMBER + len(self.texts) + (0.5 if isinstance(value, float) else 0)
            self._add(origin, str(mark))
            return mark

        return _map_leaves(
            arguments,
            lambda name: self.word(origin, name),
            number,
            lambda text: self.text(origin, text) if text.strip() else text,
        )


Visitor = Collector | Marker


def texts_of_conversation(conversation: Conversation) -> list[Text]:
    """Return every text that a template has to write for a conversation."""
    collector = Collector()
    _visit(conversation, collector)
    return collector.texts


def marked(conversation: Conversation) -> tuple[Conversation, list[Text]]:
    """Return a copy of a conversation with marks in its texts, and the marks as texts to search."""
    marker = Marker()
    return _visit(conversation, marker), marker.texts


def _visit(conversation: Conversation, visitor: Visitor) -> Conversation:
    tools = [_visit_tool(tool, visitor) for tool in conversation.tools or ()]
    messages: list[Message] = []
    marked_names: dict[str, str] = {}
    for index, message in enumerate(conversation.messages):
        changed = dict(message)
        if message["role"] == "assistant":
            _visit_assistant(changed, index, visitor)
            if calls := message.get("tool_calls"):
                changed["tool_calls"] = [
                    _visit_call(c, index, visitor, marked_names) for c in calls
                ]
        else:
            role = message["role"]
            kind = KINDS.get(role, "user")
            changed["content"] = _visit_text(
                message["content"], TextOrigin(kind, index, role), visitor
            )
            name = message.get("name")
            if isinstance(name, str) and name in marked_names:
                changed["name"] = marked_names[name]
        messages.append(changed)
    return replace(conversation, messages=messages, tools=tools or None)


def _visit_text(text: Any, origin: TextOrigin, visitor: Visitor) -> Any:
    return visitor.text(origin, text) if isinstance(text, str) and text.strip() else text


def _visit_assistant(message: Message, index: int, visitor: Visitor) -> None:
    reasoning, answer = TextOrigin("reasoning", index), TextOrigin("assistant", index)
    marked_texts: dict[str, str] = {}
    for key in REASONING_KEYS:
        text = message.get(key)
        if isinstance(text, str) and text.strip():
            message[key] = marked_texts[text] = marked_texts.get(text) or visitor.text(
                reasoning, text
            )
    content = message["content"]
    if END_OF_REASONING not in content:
        message["content"] = _visit_text(content, answer, visitor)
        return
    before, end, after = content.rpartition(END_OF_REASONING)
    first, begin, inner = before.rpartition(BEGIN_OF_REASONING)
    message["content"] = (
        _visit_text(first, answer, visitor)
        + begin
        + _visit_text(inner, reasoning, visitor)
        + end
        + _visit_text(after, answer, visitor)
    )


def _visit_call(
    call: ToolCall, index: int, visitor: Visitor, marked_names: dict[str, str]
) -> ToolCall:
    function = call["function"]
    name = function["name"]
    origin = TextOrigin("calls", index, name)
    marked_names[name] = visitor.word(origin, name)
    arguments = function["arguments"]
    if arguments:
        arguments = visitor.arguments(origin, arguments)
    return {**call, "function": {"name": marked_names[name], "arguments": arguments}}


def _visit_tool(tool: Tool, visitor: Visitor) -> Tool:
    function = tool["function"]
    origin = TextOrigin("tools", -1, function["name"])
    return {**tool, "function": visitor.schema(origin, function)}


def argument_names(function: dict[str, Any]) -> list[str]:
    """Return the names of a tool's arguments: properties of its JSON schema; else keys that JSON
    Schema does not know (xLAM), or names in a list."""
    parameters = function.get("parameters")
    if isinstance(parameters, list):
        return [item["name"] for item in parameters if _is_named(item)]
    if not isinstance(parameters, dict):
        return []
    properties = parameters.get("properties")
    if isinstance(properties, dict):
        return list(properties)
    return [n for n, value in parameters.items() if n not in SCHEMA_KEYS or isinstance(value, dict)]


def _with_names(parameters: Any, names: dict[str, str]) -> Any:
    """Return the parameters of a tool with other names of its arguments."""
    if isinstance(parameters, list):
        return [{**p, "name": names[p["name"]]} if _is_named(p) else p for p in parameters]
    properties = parameters.get("properties")
    if not isinstance(properties, dict):
        return {names.get(name, name): value for name, value in parameters.items()}
    renamed = {**parameters, "properties": {names[n]: value for n, value in properties.items()}}
    if isinstance(parameters.get("required"), list):
        required = [names.get(n, n) if isinstance(n, str) else n for n in parameters["required"]]
        renamed["required"] = required
    return renamed


def _is_named(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("name"), str)


def _map_leaves(
    value: Any,
    name: Callable[[str], Any],
    number: Callable[[float], Any],
    text: Callable[[str], Any],
) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {name(key): _map_leaves(item, name, number, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_leaves(item, name, number, text) for item in value]
    return (
        number(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    )


def reasoning_of(message: Message) -> str:
    """Return an assistant's reasoning: of its own key, or the content before its end."""
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            return str(message[key]).strip("\n")
    before, end, _ = message["content"].rpartition(END_OF_REASONING)
    return before.split(BEGIN_OF_REASONING)[-1].strip("\n") if end else ""


def without_reasoning(message: Message) -> Message:
    """Return an assistant's message without its reasoning, in its own key or in the content."""
    rest_of_message = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    before, end, after = message["content"].rpartition(END_OF_REASONING)
    first = before.rpartition(BEGIN_OF_REASONING)[0] if end else ""
    return {**rest_of_message, "content": first + after.lstrip("\n") if end else message["content"]}


MAX_SHAPES = 4096


@dataclass(frozen=True)
class Turn:
    """A trained turn of a text. index: number of its message. start: its first character, where its
    prompt ends. stop: its end, after its end-of-turn token."""

    index: int
    start: int
    stop: int


@dataclass
class TurnText:
    """A rendered conversation with its trained turns; messages: shown."""

    text: str
    messages: int
    turns: list[Turn] = field(default_factory=list)


Render = Callable[[Conversation], list[TurnText]]


class RenderedTexts:
    """Finds texts that a template leaves out; allowed: kinds; render: renders a conversation."""

    def __init__(self, render: Render, *, allowed: Collection[TextKind]) -> None:
        self._render = render
        self._allowed = frozenset(allowed)
        self._lost_by_shape: dict[Hashable, frozenset[TextKind]] = {}

    def check(self, conversation: Conversation, documents: Sequence[TurnText]) -> set[TextKind]:
        """Return the allowed kinds of text that the template leaves out. documents: the rendered
        conversation. Raises `RowError` with the name of a text that must not be left out."""
        lost_in_shape = self._lost_in_shape(conversation)
        missing = _missing(texts_of_conversation(conversation), documents)
        lost = {text.origin.kind for text in missing}
        if lost <= lost_in_shape and lost_in_shape <= self._allowed:
            return lost
        return self._decide(conversation)

    def _lost_in_shape(self, conversation: Conversation) -> frozenset[TextKind]:
        shape = _shape(conversation)
        kinds = self._lost_by_shape.get(shape)
        if kinds is None:
            try:
                kinds = frozenset(text.origin.kind for text in self._lost(conversation))
            except RowError:  # a template may refuse marks; then the search alone decides
                kinds = frozenset()
            if len(self._lost_by_shape) < MAX_SHAPES:
                self._lost_by_shape[shape] = kinds
        return kinds

    def _decide(self, conversation: Conversation) -> set[TextKind]:
        lost = self._lost(conversation)
        for text in lost:
            if text.origin.kind not in self._allowed:
                raise RowError(
                    f"text not rendered: the chat template leaves out {text.name}; give one that "
                    "writes and trains it in data.chat_template, or allow its loss: "
                    f"data.allow_unrendered: [{text.origin.kind}]"
                )
        return {text.origin.kind for text in lost}

    def _lost(self, conversation: Conversation) -> list[Text]:
        copy, marks = marked(conversation)
        return list(_missing(marks, self._render(copy), trained_only=True))


def _missing(
    texts: Sequence[Text], documents: Sequence[TurnText], *, trained_only: bool = False
) -> Iterator[Text]:
    """Yield the texts that a document lacks. A trained turn must be complete where it is trained
    (`trained_only`): templates leave reasoning and answers out of later prompts."""
    trained = {turn.index for document in documents for turn in document.turns}
    before = ""
    ends: dict[int, int] = {}  # of texts in the common beginning with the document before
    for document in documents:
        trained_texts = {turn.index: document.text for turn in document.turns}
        if trained_only:
            trained_texts = {
                turn.index: document.text[turn.start : turn.stop] for turn in document.turns
            }
        shared = shared_length(before, document.text)
        before, ends = document.text, {n: end for n, end in ends.items() if end <= shared}
        for number, text in enumerate(texts):
            kind, message, _ = text.origin
            if message >= document.messages:
                continue
            if message not in trained_texts and (message in trained or kind == "reasoning"):
                continue
            searched = trained_texts.get(message, document.text)
            if number in ends and searched is document.text:
                continue
            start = searched.find(text.value)
            if start < 0:
                if not text.stands_in(searched):
                    yield text
            elif searched is document.text:
                ends[number] = start + len(text.value)


def _shape(conversation: Conversation) -> Hashable:
    turns = zip(conversation.messages, conversation.trained, strict=True)
    kinds = [message_kind(message, is_trained=is_trained) for message, is_trained in turns]
    return (
        tuple(kinds[:2]),
        kinds[-1],
        frozenset(pairwise(kinds)),
        len(kinds).bit_length(),
        min(len(conversation.tools or ()), 2),
        frozenset(map(_form, conversation.tools or ())),
        repr(conversation.template_kwargs) if conversation.template_kwargs else "",
    )


def _form(tool: Tool) -> Hashable:
    parameters = tool["function"].get("parameters")
    is_schema = isinstance(parameters, dict) and "properties" in parameters
    return is_schema, bool(argument_names(tool["function"]))


def message_kind(message: Message, *, is_trained: bool) -> Hashable:
    """Return all facts about a message but its texts, by which a template may treat it in another
    way."""
    content = message["content"]
    return (
        message["role"],
        is_trained,
        tuple(filter(message.get, message)),
        not content.strip(),
        END_OF_REASONING in content,
        min(len(message.get("tool_calls") or ()), 2),
    )
