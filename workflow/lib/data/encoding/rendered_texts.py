"""Whether the chat template wrote every text of a conversation.

That a template writes conversations of one shape (roles, keys, what is empty) is proved once, with
a conversation in which every text is marked. Each row's texts are then searched in what was
rendered of it. What is not found so, for a template may rewrite it, is decided by a marked copy of
that row."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from workflow.lib.data.encoding.chat_messages import Conversation, Message
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.template_texts import (
    END_OF_REASONING,
    Text,
    marked,
    texts_of_conversation,
)
from workflow.lib.settings.data import TextKind

MAX_SHAPES = 4096


@dataclass(frozen=True)
class Turn:
    """A trained turn of a text. index: number of its message. start: where it begins, and its
    prompt ends. stop: where it ends, its end-of-turn token included."""

    index: int
    start: int
    stop: int


@dataclass
class TurnText:
    """A conversation as the template writes it, with its trained turns; messages: shown."""

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
        """Return what the template leaves out and may. documents: what was rendered of the
        conversation. Raises `RowError` that names the text if it must not."""
        known = self._lost_in_shape(conversation)
        missing = _missing(texts_of_conversation(conversation), documents)
        lost = {text.place.kind for text in missing}
        if lost <= known and known <= self._allowed:
            return lost
        return self._decide(conversation)

    def _lost_in_shape(self, conversation: Conversation) -> frozenset[TextKind]:
        shape = _shape(conversation)
        known = self._lost_by_shape.get(shape)
        if known is None:
            try:
                known = frozenset(text.place.kind for text in self._lost(conversation))
            except RowError:  # a template may refuse marks; then the search alone decides
                known = frozenset()
            if len(self._lost_by_shape) < MAX_SHAPES:
                self._lost_by_shape[shape] = known
        return known

    def _decide(self, conversation: Conversation) -> set[TextKind]:
        lost = self._lost(conversation)
        for text in lost:
            if text.place.kind not in self._allowed:
                raise RowError(
                    f"text not rendered: the chat template leaves out {text.name}; give one that "
                    "writes and trains it in data.chat_template, or allow its loss: "
                    f"data.allow_unrendered: [{text.place.kind}]"
                )
        return {text.place.kind for text in lost}

    def _lost(self, conversation: Conversation) -> list[Text]:
        copy, marks = marked(conversation)
        return list(_missing(marks, self._render(copy), trained_only=True))


def _missing(
    texts: Sequence[Text], documents: Sequence[TurnText], *, trained_only: bool = False
) -> Iterator[Text]:
    """Yield the texts that a document should hold and does not. A trained turn matters where it is
    trained (`trained_only`): templates leave reasoning and answers out of later prompts."""
    trained = {turn.index for document in documents for turn in document.turns}
    for document in documents:
        own = {turn.index: document.text for turn in document.turns}
        if trained_only:
            own = {turn.index: document.text[turn.start : turn.stop] for turn in document.turns}
        for text in texts:
            kind, message, _ = text.place
            if message >= document.messages:
                continue
            if message not in own and (message in trained or kind == "reasoning"):
                continue
            if not text.stands_in(own.get(message, document.text)):
                yield text


def _shape(conversation: Conversation) -> Hashable:
    turns = zip(conversation.messages, conversation.trained, strict=True)
    kinds = [_kind(message, is_trained) for message, is_trained in turns]
    return (
        tuple(kinds[:2]),
        kinds[-1],
        frozenset(pairwise(kinds)),
        len(kinds).bit_length(),
        min(len(conversation.tools or ()), 2),
        repr(conversation.template_kwargs) if conversation.template_kwargs else "",
    )


def _kind(message: Message, is_trained: bool) -> Hashable:
    content = message["content"]
    return (
        message["role"],
        is_trained,
        tuple(filter(message.get, message)),
        not content.strip(),
        END_OF_REASONING in content,
        min(len(message.get("tool_calls") or ()), 2),
    )
