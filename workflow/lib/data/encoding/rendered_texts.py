"""A check that the chat template writes every text of a conversation.

One conversation with marked texts proves that a template writes all conversations of its shape
(roles, keys, empty texts). Each row's texts are then searched in its rendered text. A template may
rewrite a text; if the search misses one, a marked copy of the row decides."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from workflow.lib.data.encoding.chat_messages import END_OF_REASONING, Conversation
from workflow.lib.data.encoding.message_forms import Message
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.safe_encoder import shared_length
from workflow.lib.data.encoding.template_texts import (
    Text,
    argument_names,
    marked,
    texts_of_conversation,
)
from workflow.lib.data.encoding.tool_calls import Tool
from workflow.lib.settings.data import TextKind

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
