"""The beginning of a turn whose conversation does not begin with the turn's prompt.

The prompt may open the reasoning (`<think>`) or close it, or have the system text elsewhere. The
turn then follows the prompt as the model has to write it. A turn of one mark shows how the template
begins a turn, once for each end of a prompt."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from workflow.lib.data.encoding.chat_messages import (
    BEGIN_OF_REASONING,
    END_OF_REASONING,
    Conversation,
)
from workflow.lib.data.encoding.chat_template import ChatTemplate
from workflow.lib.data.encoding.keys_read import REASONING_KEYS
from workflow.lib.data.encoding.message_forms import Message
from workflow.lib.data.encoding.probe_conversations import PROBE
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.safe_encoder import SafeEncoder
from workflow.lib.data.encoding.template_texts import reasoning_of, texts_of_conversation

CONTENT, REASONING = "qcontentq", "qreasoningq"  # marks
# The text of DeepSeek R1 and QwQ after a reasoning that their prompt opens and no turn shows.
USUAL_END = f"\n{END_OF_REASONING}\n\n"
OPENED = re.compile(rf"{BEGIN_OF_REASONING}\s*$")
TAG = r"<[^<>\s]{1,40}>"
MAX_ANCHORS = 4  # special tokens of a prompt's end at which the common text may begin
MAX_OPENINGS = 1024


class ReasoningClosedError(RowError):
    """The prompt ends a reasoning that the turn has."""


@dataclass(frozen=True)
class Opening:
    """The beginning of a turn, after the common text of prompt and conversation. shared: length of
    that text, from a special token on. tail: length of the rest of the prompt. header: text of the
    conversation before the turn's own. written_header: the part of it that the model has to write.
    close: its text after a reasoning that the prompt opens and the conversation does not show; None
    without one."""

    shared: int
    tail: int
    header: str
    written_header: str
    close: str | None


@dataclass(frozen=True)
class MarkedTurn:
    """A conversation whose last turn has marks for its text and its reasoning. before: text before
    the first mark. opening: text before the reasoning; None if the template shows none. close: text
    between reasoning and content. reasons: the turn has a reasoning, and `before` ends with its
    beginning."""

    before: str
    opening: str | None
    close: str
    reasons: bool

    def is_opened_by(self, prompt: str) -> bool:
        """Tell whether the prompt ends with the beginning of a reasoning."""
        if self.opening is not None and prompt.rstrip() == self.opening.rstrip():
            return True
        return OPENED.search(prompt) is not None

    def goes_on(self, prompt: str, header: str) -> bool:
        """Tell whether the prompt opens a reasoning that the turn neither shows nor closes."""
        close, header = self.close.strip(), header.strip()
        closes = header and (close == header or not close.endswith(header))
        return self.is_opened_by(prompt) and not self.reasons and not closes

    def hides_reasoning(self, prompt: str, header: str) -> bool:
        """Tell whether the template writes the end alone of a reasoning that the prompt opens
        (DeepSeek V3.1)."""
        is_hidden = self.opening is None and header.strip() == END_OF_REASONING
        return is_hidden and self.is_opened_by(prompt)

    def written_header(self, tail: str, header: str, prompt: str) -> str | None:
        """Return the part of `header` that the model has to write after the prompt's `tail`; None
        if the tail is neither the beginning of a reasoning nor an empty one."""
        if not tail:
            return header
        if tail.strip() == header.strip():
            return ""
        if not tail.strip():
            return header
        if self.reasons:
            return None
        if not header.strip() or self.goes_on(prompt, header):
            return ""
        ends = {END_OF_REASONING, self.close.strip()} - {""}
        begins = {BEGIN_OF_REASONING, self._begin(header)} - {""}
        if _without(tail, ends | begins).strip():
            return None
        if self.is_opened_by(prompt):
            closes = any(end in header for end in ends)
            return header.rpartition(BEGIN_OF_REASONING)[2] if closes else None
        return _without(header, ends | begins).strip()

    def _begin(self, header: str) -> str:
        """Return the beginning of a reasoning in place of `header`; empty if unknown."""
        shared = self.before.removesuffix(header)
        continues = self.opening is not None and self.opening.startswith(shared)
        return self.opening[len(shared) :].strip() if continues and self.opening else ""


class TurnOpenings:
    """Finds the text of a turn after the prompt of inference."""

    def __init__(self, template: ChatTemplate, encoder: SafeEncoder) -> None:
        self._template = template
        self._encoder = encoder
        special = encoder.special_pattern.pattern
        self._atoms = re.compile(rf"{special}|{TAG}|\w+|\s|.", re.DOTALL)
        self._openings: dict[object, Opening] = {}

    def answer(self, prompt: str, text: str, conversation: Conversation, index: int) -> str:
        """Return the text that the model has to write after `prompt`, and the rest of `text`, which
        ends with the message `index`. Raises `RowError` if it continues otherwise."""
        message = conversation.messages[index]
        opening = self._opening(prompt, conversation, index)
        begun = prompt[: len(prompt) - opening.tail]
        start = len(begun)
        if not text.startswith(begun):
            piece = begun[len(begun) - opening.shared :]
            piece_start = text.rfind(piece)
            if piece_start < 0 and reasoning_of(message) and OPENED.search(piece):
                piece = OPENED.sub("", piece)  # the text has its own beginning, or none
                if piece and (piece_start := text.rfind(piece)) >= 0:
                    return _after_own_opening(prompt, text[piece_start + len(piece) :])
            if piece_start < 0:
                raise _turn_not_found(index)
            start = piece_start + len(piece)
        if not text.startswith(opening.header, start):
            raise _turn_not_found(index)
        turn_text = text[start + len(opening.header) :]
        closes = opening.close is not None or opening.written_header.strip() == END_OF_REASONING
        begins = closes and turn_text.lstrip().startswith(BEGIN_OF_REASONING)
        if begins or (opening.close is not None and END_OF_REASONING in turn_text):
            return _after_own_opening(prompt, turn_text)  # the text's own, as it stands
        if opening.close is not None:
            return reasoning_of(message) + opening.close + turn_text.lstrip("\n")
        return opening.written_header + turn_text

    def _opening(self, prompt: str, conversation: Conversation, index: int) -> Opening:
        message = conversation.messages[index]
        key = (
            prompt[self._encoder.start_of_last_special(prompt) or 0 :],
            conversation.messages[index - 1]["role"],
            bool(reasoning_of(message)),
            bool(message.get("tool_calls")),
            repr(conversation.template_kwargs),
        )
        opening = self._openings.get(key)
        if opening is None:
            opening = self._learn(prompt, conversation, index)
            if len(self._openings) < MAX_OPENINGS:
                self._openings[key] = opening
        return opening

    def _learn(self, prompt: str, conversation: Conversation, index: int) -> Opening:
        """Render the turn with marks for its text and its reasoning, with its calls or without."""
        message = conversation.messages[index]
        usual, _ = self._template.render(
            PROBE.messages[:1],
            tools=conversation.tools,
            template_kwargs=conversation.template_kwargs,
            add_generation_prompt=True,
        )
        bare = {k: v for k, v in message.items() if k not in REASONING_KEYS} | {"content": CONTENT}
        for turn in [bare, *_with_named_call(bare), {"role": "assistant", "content": CONTENT}]:
            marked = self._marked(conversation, index, turn)
            # shortest header first: an earlier turn may hold the token that ends the prompt
            splits = sorted(self._splits(prompt, marked.before), key=lambda split: len(split[2]))
            for shared, tail, header in splits:
                begun = marked.before.removesuffix(header)
                if not usual.endswith(tail) or not _holds(
                    begun, marked.before, conversation, index
                ):
                    continue  # tail or header are of a message before this one
                written_header = marked.written_header(tail, header, prompt)
                if written_header is not None:
                    close = marked.close if marked.goes_on(prompt, header) else None
                    if reasoning_of(message) and marked.hides_reasoning(prompt, header):
                        close = header
                    return Opening(shared, len(tail), header, written_header, close)
            if marked.reasons:
                raise ReasoningClosedError(
                    f"text not rendered: the prompt of message {index + 1} closes the reasoning "
                    "that the message has; switch it on (data.template_kwargs), or allow its loss: "
                    "data.allow_unrendered: [reasoning]"
                )
        raise _turn_not_found(index)

    def _marked(self, conversation: Conversation, index: int, turn: Message) -> MarkedTurn:
        plain = self._shown(conversation, index, turn)
        reasoned = self._shown(conversation, index, turn | {REASONING_KEYS[0]: REASONING})
        reasoning_start, content_start = reasoned.find(REASONING), reasoned.find(CONTENT)
        shows = 0 <= reasoning_start < content_start
        reasons = shows and bool(reasoning_of(conversation.messages[index]))
        return MarkedTurn(
            before=reasoned[:reasoning_start] if reasons else plain[: max(0, plain.find(CONTENT))],
            opening=reasoned[:reasoning_start] if shows else None,
            close=reasoned[reasoning_start + len(REASONING) : content_start]
            if shows
            else USUAL_END,
            reasons=reasons,
        )

    def _splits(self, prompt: str, before: str) -> Iterator[tuple[int, str, str]]:
        """Yield the length of the common text up to a special token, and the two rests."""
        anchor: int | None = len(prompt)
        for _ in range(MAX_ANCHORS):
            anchor = self._encoder.start_of_last_special(prompt[:anchor])
            if anchor is None:
                break
            common_start = before.rfind(self._encoder.special_text(prompt, anchor))
            if common_start >= 0:
                shared = self._shared(prompt[anchor:], before[common_start:])
                yield shared, prompt[anchor + shared :], before[common_start + shared :]

    def _shared(self, text: str, other: str) -> int:
        ends = [{m.end() for m in self._atoms.finditer(t)} for t in (text, other)]
        common = sorted(ends[0] & ends[1], reverse=True)
        return next((end for end in common if text[:end] == other[:end]), 0)

    def _shown(self, conversation: Conversation, index: int, message: Message) -> str:
        return self._template.render(
            [*conversation.messages[:index], message],
            tools=conversation.tools,
            template_kwargs=conversation.template_kwargs,
        )[0]


def _with_named_call(turn: Message) -> Iterator[Message]:
    """Yield the turn with the mark as the name of its first call, for templates that write no text
    beside calls."""
    if calls := turn.get("tool_calls"):
        function = {**calls[0]["function"], "name": CONTENT}
        yield {**turn, "content": "", "tool_calls": [{**calls[0], "function": function}]}


def _holds(begun: str, before: str, conversation: Conversation, index: int) -> bool:
    """Tell whether `begun` has those texts of the message before a turn that `before` has."""
    last = replace(conversation, messages=conversation.messages[index - 1 : index], tools=None)
    return all(t.stands_in(begun) or not t.stands_in(before) for t in texts_of_conversation(last))


def _without(text: str, tags: Collection[str]) -> str:
    for tag in sorted(tags, key=len, reverse=True):
        text = text.replace(tag, "")
    return text


def _after_own_opening(prompt: str, text: str) -> str:
    """Return a text without its own beginning of the reasoning that the prompt opens."""
    begun = text.lstrip().removeprefix(BEGIN_OF_REASONING)
    return begun.lstrip("\n") if prompt.endswith("\n") else begun


def _turn_not_found(index: int) -> RowError:
    return RowError(
        f"turn not found: the chat template does not write message {index + 1} behind what it "
        "renders as its prompt (add_generation_prompt); give one that does in data.chat_template"
    )
