"""Conversations to text through a chat template, and where in it the trained turns stand.

A turn begins where the prompt ends that the template renders for inference, and ends with the last
special token of the conversation up to this turn. Both are positions in the rendered text. A turn
that the whole conversation shows otherwise (templates of reasoning models leave reasoning out of
earlier turns) stands in a text of its own: the prompt and the turn as inference has them. Where a
template marks turns by `{% generation %}` blocks and no turn can depend on later ones, one
rendering tells all.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from workflow.lib.data.encoding.chat_messages import (
    Conversation,
    Message,
    RowError,
    map_texts,
    texts_of,
)
from workflow.lib.data.encoding.chat_template import ChatTemplate, Spans
from workflow.lib.data.encoding.safe_encoder import SafeEncoder

LossOn = Literal["completions", "last_turn", "all"]

# Some templates open the reasoning in the prompt, and leave all reasoning out of the turn (DeepSeek
# R1, QwQ).
OPENED_REASONING = re.compile(r"<think>\s*$")
END_OF_REASONING = "</think>"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Turn:
    """A trained turn of a text.

    start: where it begins, and its prompt ends. spans: the characters that are trained.
    """

    start: int
    spans: Spans

    @property
    def stop(self) -> int:
        """Where the last trained character ends."""
        return max(end for _, end in self.spans)


@dataclass
class TurnText:
    """A conversation as the template writes it, whole or up to some turn, and its trained turns."""

    text: str
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True)
class Rendered:
    """The texts of a conversation.

    guarded: the data spell special tokens, which are spelled otherwise here.
    """

    texts: list[TurnText]
    guarded: bool


class TurnRenderer:
    """Renders conversations by one template, and finds the turns that `loss_on` trains."""

    def __init__(self, template: ChatTemplate, *, encoder: SafeEncoder, loss_on: LossOn) -> None:
        self.template = template
        self._encoder = encoder
        self._loss_on = loss_on
        self._header: str | None = None
        """What ends each prompt, where a turn is a `{% generation %}` block behind it in every
        conversation."""

    def trust_blocks(self, whole: str, blocks: Spans, turn: Turn) -> None:
        """Take blocks for turns from now on, if the template allows it and this one turn agrees."""
        steady = self.template.has_constant_prompt and not self.template.looks_ahead
        if steady and blocks and turn.start == blocks[0][0] and turn.spans == blocks:
            prompt = whole[: turn.start]
            self._header = prompt[self._encoder.start_of_last_special(prompt) or 0 :]

    def render(self, conversation: Conversation) -> Rendered:
        """Return the conversation's texts. Raises `RowError` if the template fails."""
        conversation = self.template.adapted(conversation)
        self.template.check_tools(conversation)
        guarded = self._holds_special(conversation)
        if guarded:
            plain, conversation = conversation, self._guard(conversation)
            guarded = conversation != plain
        messages, tools = conversation.messages, conversation.tools
        whole, blocks = self.template.render(messages, tools=tools)
        if self._loss_on == "all":
            return Rendered([TurnText(whole)], guarded)
        turns = [index for index, is_trained in enumerate(conversation.trained) if is_trained]
        if self._loss_on == "last_turn":
            turns = turns[-1:]
        answers = [index for index, m in enumerate(messages) if m["role"] == "assistant"]
        if self._blocks_are_turns(whole, blocks) and len(blocks) == len(answers):
            marked = [b for a, b in zip(answers, blocks, strict=True) if a in turns and b[0] < b[1]]
            return Rendered([TurnText(whole, [Turn(b[0], [b]) for b in marked])], guarded)
        return Rendered(self.turn_texts(conversation, whole, blocks, turns), guarded)

    def _blocks_are_turns(self, text: str, blocks: Spans) -> bool:
        header = self._header
        return header is not None and all(text.endswith(header, 0, start) for start, _ in blocks)

    def turn_texts(
        self, conversation: Conversation, whole: str, blocks: Spans, turns: list[int]
    ) -> list[TurnText]:
        """Return texts in which each of these turns follows the prompt that inference would render.

        whole, blocks: the rendered conversation. turns: numbers of messages, from 0. Turns share a
        text as long as it begins as inference has it: first the whole, then the longest others.
        """
        messages, tools = conversation.messages, conversation.tools
        texts = [TurnText(whole)]
        for index in reversed(turns):
            prompt, _ = self.template.render(
                messages[:index], tools=tools, add_generation_prompt=True
            )
            text, turn_blocks = whole, blocks
            if index + 1 < len(messages):
                text, turn_blocks = self.template.render(messages[: index + 1], tools=tools)
            text, turn_blocks = self._after_prompt(
                prompt, text, turn_blocks, messages[index], index
            )
            turn = self._turn(text, turn_blocks, start=len(prompt), index=index)
            beginning = text[: turn.stop]
            host = next((other for other in texts if other.text.startswith(beginning)), None)
            if host is None:
                texts.append(host := TurnText(text))
            host.turns.insert(0, turn)
        return [text for text in reversed(texts) if text.turns]

    def _after_prompt(
        self, prompt: str, text: str, blocks: Spans, message: Message, index: int
    ) -> tuple[str, Spans]:
        """Return the text that begins with the prompt and goes on with the turn, and its blocks.

        Raises `RowError` if the turn is not found.
        """
        if text.startswith(prompt):
            return text, blocks
        opened = OPENED_REASONING.search(prompt)
        begun = prompt[: opened.start()] if opened else prompt
        anchor = self._encoder.start_of_last_special(begun)
        if text.startswith(begun):
            start = len(begun)
        elif anchor is not None and begun[anchor:] in text:
            start = text.rindex(begun[anchor:]) + len(begun) - anchor
        else:
            raise RowError(
                f"turn not found: the chat template does not write message {index + 1} behind what "
                "it renders as its prompt (add_generation_prompt); give one that does in "
                "data.chat_template"
            )
        answer = text[start:]
        if opened:
            answer = f"{_reasoning(message)}\n{END_OF_REASONING}\n\n{answer.lstrip(chr(10))}"
        end = len(prompt) + len(answer)
        return prompt + answer, [(len(prompt), end)] if blocks else []

    def _turn(self, text: str, blocks: Spans, *, start: int, index: int) -> Turn:
        """Return the turn behind the prompt `text[:start]`, without what follows its end."""
        stop = self._encoder.end_of_last_special(text, start) or len(text)
        spans = [(start, stop)]
        if blocks:
            spans = [(max(first, start), min(end, stop)) for first, end in blocks]
        spans = [(first, end) for first, end in spans if first < end]
        if not spans:
            raise RowError(f"no trained token: the chat template writes message {index + 1} empty")
        return Turn(start, spans)

    def _guard(self, conversation: Conversation) -> Conversation:
        """Return the conversation with special tokens spelled otherwise.

        Those that the template searches for in an assistant's text, such as the end of its
        reasoning, are its own.
        """
        guard = self._encoder.guard
        own = self.template.searched_texts
        messages: list[Message] = []
        for message in conversation.messages:
            guarded: Message = map_texts(message, guard)
            if message["role"] == "assistant":
                guarded["content"] = guard(message["content"], but=own)
            messages.append(guarded)
        return replace(conversation, messages=messages, tools=map_texts(conversation.tools, guard))

    def _holds_special(self, conversation: Conversation) -> bool:
        texts = texts_of([conversation.messages, conversation.tools])
        holds = self._encoder.holds_special
        return holds("\n".join(texts)) and any(map(holds, texts))  # one search where none has any


def _reasoning(message: Message) -> str:
    """Return an assistant's reasoning: of a key of its own, or what stands before its end."""
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            return str(message[key]).strip("\n")
    before, end, _ = message["content"].rpartition(END_OF_REASONING)
    return before.split("<think>")[-1].strip("\n") if end else ""
