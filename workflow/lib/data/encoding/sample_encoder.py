"""Conversations, texts and ready token ids to documents: token ids and loss masks.

What an assistant says is trained, its end-of-turn token included. It begins where the prompt ends
that the template renders for inference, and ends with the last special token of the conversation up
to this turn. Both are places in the rendered text. A turn that the whole conversation shows
otherwise (templates of reasoning models leave reasoning out of earlier turns), or whose prompt has
other tokens there, becomes an example of its own: the prompt and the turn as inference has them.
Where a template marks turns by `{% generation %}` blocks and no turn can depend on later ones, one
rendering tells all. Masks say which token is a prediction target, so the first token of a document
is never one.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from workflow.lib.data.encoding.chat_messages import (
    Conversation,
    Message,
    RowError,
    Tool,
    ToolCall,
    map_texts,
    texts_of,
)
from workflow.lib.data.encoding.chat_template import ChatTemplate, Spans
from workflow.lib.data.encoding.row_formats import Sample, TokenRow
from workflow.lib.data.encoding.safe_encoder import SafeEncoder, token_span
from workflow.lib.system.errors import UserError

LossOn = Literal["completions", "last_turn", "all"]

PROBE = Conversation(
    [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}],
    [False, True],
)
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "ping",
        "description": "Send a ping.",
        "parameters": {"type": "object", "properties": {"host": {"type": "string"}}},
    },
}
_CALL: ToolCall = {
    "type": "function",
    "function": {"name": "ping", "arguments": {"host": "a.example"}},
}
_ASKED: list[Message] = [
    {"role": "user", "content": "ping a.example"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]
_ANSWERED: list[Message] = [
    {"role": "tool", "name": "ping", "content": "12 ms"},
    {"role": "assistant", "content": "It answered in 12 ms."},
]
PROBE_TEXT = (
    "Zwölf Boxkämpfer, 12,345 x 6.78:\n\n\tdef f(x):\n        return x  # naïve, 日本 \U0001f642"
)
# Written to the manifest as they are trained, so that an export can be held against them.
PROBES = (
    PROBE,
    Conversation(
        [{"role": "system", "content": "Be brief."}, *PROBE.messages, *PROBE.messages],
        [False, False, True, False, True],
    ),
    Conversation(_ASKED, [False, True], [_TOOL]),
    Conversation(_ASKED + _ANSWERED, [False, True, False, True], [_TOOL]),
)
# Some templates open the reasoning in the prompt, and leave all reasoning out of the turn (DeepSeek
# R1, QwQ).
OPENED_REASONING = re.compile(r"<think>\s*$")
END_OF_REASONING = "</think>"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Encoded:
    """A document: token ids uint32 and loss mask bool, both of shape (length,); False at position
    0.
    """

    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.bool_]
    held_special_text: bool
    """The data spelled a special token; it was encoded as ordinary text."""


class TextProbe(TypedDict):
    """A text, and the token ids that it is trained as."""

    text: str
    ids: list[int]


class ChatProbe(TypedDict):
    """A conversation, and the token ids that it is trained as."""

    messages: list[Message]
    tools: list[Tool] | None
    ids: list[int]


@dataclass(frozen=True)
class _Turn:
    """Where an assistant's turn begins in a text (its prompt ends there), and the characters that
    are trained."""

    start: int
    spans: Spans

    @property
    def stop(self) -> int:
        return max(end for _, end in self.spans)


@dataclass
class _Text:
    """A conversation as the template writes it, whole or up to some turn, with the turns to be
    trained in it."""

    text: str
    turns: list[_Turn] = field(default_factory=list)


@dataclass(frozen=True)
class _Rendered:
    """The texts of a conversation; guarded: its data spell special tokens, which are spelled
    otherwise here."""

    texts: list[_Text]
    guarded: bool


class SampleEncoder:
    """Encodes samples; `chat_template` may be None if no sample is a conversation."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None, loss_on: LossOn
    ) -> None:
        self._encoder = SafeEncoder(tokenizer)
        self._vocab_size = len(tokenizer)
        self._loss_on = loss_on
        self._bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._eos = [tokenizer.eos_token_id]
        self._template: ChatTemplate | None = None
        self._header: str | None = None
        """What ends each prompt, where a turn is a `{% generation %}` block behind it in every
        conversation."""
        if chat_template is not None:
            self._template = ChatTemplate(chat_template, variables=tokenizer.special_tokens_map)
            self._check_template(self._template)

    def encode(self, sample: Sample) -> list[Encoded]:
        """Return the sample's tokens and masks: one example, or several where turns need prompts of
        their own.

        Raises `RowError` if the template or the mask fails.
        """
        return self.begin(sample)()

    def begin(self, sample: Sample) -> Callable[[], list[Encoded]]:
        """Return what encodes the sample; of a conversation, rendered now. Both raise `RowError` as
        `encode` does.

        To begin many samples and then end them takes four fifths of the time of one after the
        other: template and tokenizer do not put each other out of the processor's caches.
        """
        if isinstance(sample, Conversation):
            assert self._template is not None, "conversations need a chat template"
            return partial(self._encode_chat, self._render(self._template, sample))
        if self._loss_on == "last_turn":
            raise RowError("no turns: data.loss_on = last_turn needs conversations")
        if isinstance(sample, TokenRow):
            return partial(self._encode_tokens, sample)
        return partial(self._encode_text, sample)

    def encoded_probes(self) -> list[TextProbe | ChatProbe]:
        """Return a text, and those of `PROBES` that the template takes, with the ids as trained."""
        text: TextProbe = {"text": PROBE_TEXT, "ids": self._encoder.encode_plain(PROBE_TEXT).ids}
        chats: list[ChatProbe] = [
            {"messages": probe.messages, "tools": probe.tools, "ids": ids}
            for probe, ids, _ in self._answered_probes()
        ]
        return [text, *chats]

    def end_of_turn_ids(self) -> list[int]:
        """Return the special tokens that end what the assistant is trained to say; none without a
        template.
        """
        ends = {end for _, _, last_tokens in self._answered_probes() for end in last_tokens}
        return sorted(ends & self._encoder.special_ids)

    def _answered_probes(self) -> Iterator[tuple[Conversation, list[int], list[int]]]:
        """Yield each probe that the template takes, with its ids and the last tokens of its trained
        turns.
        """
        if self._template is None:
            return
        for probe in PROBES:
            try:
                yield probe, *self._answered(self._template, probe)
            except RowError:
                continue  # a template may refuse system messages or tools, then data with them too

    def _answered(
        self, template: ChatTemplate, conversation: Conversation
    ) -> tuple[list[int], list[int]]:
        """Return the whole conversation's ids, and the last token of each trained turn. It spells
        no special token.
        """
        conversation = template.adapted(conversation)
        template.check_tools(conversation)
        whole, blocks = template.render(conversation.messages, tools=conversation.tools)
        turns = [index for index, is_trained in enumerate(conversation.trained) if is_trained]
        texts = self._texts(template, conversation, whole, blocks, turns)
        examples = [e for text in texts for e in self._examples(text, guarded=False)]
        ends = [int(i) for e in examples for i in e.ids[e.mask & ~np.append(e.mask[1:], False)]]
        return self._encoder.encode_rendered(whole, guarded=False).ids, ends

    def _encode_text(self, text: str) -> list[Encoded]:
        """Every token is trained; bos (if the tokenizer has one) and eos stand around the text
        once.
        """
        ids = [*self._bos, *self._encoder.encode_plain(text).ids, *self._eos]
        return [_encoded(ids, [(0, len(ids))], self._encoder.holds_special(text))]

    def _encode_tokens(self, row: TokenRow) -> list[Encoded]:
        """Take the ids as they are: nothing is put before or behind them."""
        if min(row.ids) < 0 or max(row.ids) >= self._vocab_size:
            wrong = next(token for token in row.ids if not 0 <= token < self._vocab_size)
            raise RowError(
                f"unknown token: id {wrong}, the tokenizer has 0 to {self._vocab_size - 1}"
            )
        if self._loss_on == "all":
            mask = np.ones(len(row.ids), dtype=np.bool_)
        elif row.trained is None:
            raise RowError("no labels: token ids need labels or loss_mask, or data.loss_on = all")
        else:
            mask = np.array(row.trained, dtype=np.bool_)
        if not mask[1:].any():
            raise RowError("no trained token: the labels name none behind the first token")
        mask[:1] = False
        return [Encoded(np.array(row.ids, dtype=np.uint32), mask, held_special_text=False)]

    def _render(self, template: ChatTemplate, conversation: Conversation) -> _Rendered:
        conversation = template.adapted(conversation)
        template.check_tools(conversation)
        guarded = self._holds_special(conversation)
        if guarded:
            plain, conversation = conversation, self._guard(conversation)
            guarded = conversation != plain
        messages, tools = conversation.messages, conversation.tools
        whole, blocks = template.render(messages, tools=tools)
        if self._loss_on == "all":
            return _Rendered([_Text(whole)], guarded)
        turns = [index for index, is_trained in enumerate(conversation.trained) if is_trained]
        if self._loss_on == "last_turn":
            turns = turns[-1:]
        answers = [index for index, m in enumerate(messages) if m["role"] == "assistant"]
        if self._blocks_are_turns(whole, blocks) and len(blocks) == len(answers):
            marked = [b for a, b in zip(answers, blocks, strict=True) if a in turns and b[0] < b[1]]
            return _Rendered([_Text(whole, [_Turn(b[0], [b]) for b in marked])], guarded)
        return _Rendered(self._texts(template, conversation, whole, blocks, turns), guarded)

    def _blocks_are_turns(self, text: str, blocks: Spans) -> bool:
        header = self._header
        return header is not None and all(text.endswith(header, 0, start) for start, _ in blocks)

    def _texts(
        self,
        template: ChatTemplate,
        conversation: Conversation,
        whole: str,
        blocks: Spans,
        turns: list[int],
    ) -> list[_Text]:
        """Return texts in which each of these turns follows the prompt that inference would render.

        Turns share a text as long as it begins as inference has it: first the whole, then the
        longest others.
        """
        messages, tools = conversation.messages, conversation.tools
        texts = [_Text(whole)]
        for index in reversed(turns):
            prompt, _ = template.render(messages[:index], tools=tools, add_generation_prompt=True)
            text, turn_blocks = whole, blocks
            if index + 1 < len(messages):
                text, turn_blocks = template.render(messages[: index + 1], tools=tools)
            text, turn_blocks = self._after_prompt(
                prompt, text, turn_blocks, messages[index], index
            )
            turn = self._turn(text, turn_blocks, start=len(prompt), index=index)
            beginning = text[: turn.stop]
            host = next((other for other in texts if other.text.startswith(beginning)), None)
            if host is None:
                texts.append(host := _Text(text))
            host.turns.insert(0, turn)
        return [text for text in reversed(texts) if text.turns]

    def _after_prompt(
        self, prompt: str, text: str, blocks: Spans, message: Message, index: int
    ) -> tuple[str, Spans]:
        """Return the text that begins with the prompt and goes on with the turn, and its generation
        blocks.

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
                "it renders "
                "as its prompt (add_generation_prompt); give one that does in data.chat_template"
            )
        answer = text[start:]
        if opened:
            answer = f"{_reasoning(message)}\n{END_OF_REASONING}\n\n{answer.lstrip(chr(10))}"
        end = len(prompt) + len(answer)
        return prompt + answer, [(len(prompt), end)] if blocks else []

    def _turn(self, text: str, blocks: Spans, *, start: int, index: int) -> _Turn:
        """Return the turn that follows the prompt `text[:start]`, without what the template writes
        behind its end."""
        stop = self._encoder.end_of_last_special(text, start) or len(text)
        spans = [(start, stop)]
        if blocks:
            spans = [(max(first, start), min(end, stop)) for first, end in blocks]
        spans = [(first, end) for first, end in spans if first < end]
        if not spans:
            raise RowError(f"no trained token: the chat template writes message {index + 1} empty")
        return _Turn(start, spans)

    def _guard(self, conversation: Conversation) -> Conversation:
        """Return the conversation with special tokens spelled otherwise.

        Those that the template searches for in an assistant's text, such as the end of its
        reasoning, are its own.
        """
        assert self._template is not None
        guard = self._encoder.guard
        own = self._template.searched_texts
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

    def _encode_chat(self, rendered: _Rendered) -> list[Encoded]:
        if self._loss_on == "all":
            ids = self._encoder.encode_rendered(
                rendered.texts[0].text, guarded=rendered.guarded
            ).ids
            return [_encoded(ids, [(0, len(ids))], rendered.guarded)]
        examples = [e for text in rendered.texts for e in self._examples(text, rendered.guarded)]
        if not any(encoded.mask.any() for encoded in examples):
            raise RowError("no trained token: the chat template marks none as the assistant's")
        return examples

    def _examples(self, text: _Text, guarded: bool) -> list[Encoded]:
        """Return the text's example; a turn whose prompt has other tokens in it has one of its own
        before."""
        encoding = self._encoder.encode_rendered(text.text, guarded=guarded)
        ids = encoding.ids  # a list made anew at each look
        examples, spans = [], []
        for turn in text.turns:
            if self._encoder.is_prompt(encoding, ids, text.text, turn.start, guarded=guarded):
                spans += [self._tokens(encoding, ids, span) for span in turn.spans]
            else:
                examples.append(self._own_example(text.text, turn, guarded))
        if spans or not text.turns:
            examples.append(_encoded(ids, spans, guarded))
        return examples

    def _own_example(self, text: str, turn: _Turn, guarded: bool) -> Encoded:
        """Return the prompt's tokens and behind them those of the turn, which is encoded by
        itself."""
        prompt = self._encoder.encode_rendered(text[: turn.start], guarded=guarded).ids
        try:
            answer = self._encoder.encode_answer(text[turn.start : turn.stop], guarded=guarded)
        except ValueError as error:
            raise RowError(f"turn not found: {error}") from None
        if not self._encoder.special_ids.intersection(answer[-1:]):
            answer += self._encoder.special_at(text, turn.stop)
        ids = prompt + answer
        return _encoded(ids, [(len(prompt), len(ids))], guarded)

    def _tokens(self, encoding: Encoding, ids: list[int], span: tuple[int, int]) -> tuple[int, int]:
        first, stop = token_span(encoding, *span)
        return first, self._with_end_of_turn(ids, first, stop)

    def _with_end_of_turn(self, ids: list[int], first: int, stop: int) -> int:
        """Extend a span by the special token behind it, where the template left it out of the
        block.
        """
        special = self._encoder.special_ids
        ends_open = stop > first and ids[stop - 1] not in special
        return stop + 1 if ends_open and stop < len(ids) and ids[stop] in special else stop

    def _check_template(self, template: ChatTemplate) -> None:
        """Render one exchange: its answer must be found, and must end with a special token."""
        try:
            whole, blocks = template.render(PROBE.messages, tools=None)
            text = self._texts(template, PROBE, whole, blocks, [1])[0]
            encoded = self._examples(text, guarded=False)[-1]
        except RowError as error:
            raise _template_error(
                f"a question and an answer cannot be rendered ({error})"
            ) from None
        if int(encoded.ids[encoded.mask][-1]) not in self._encoder.special_ids:
            raise _template_error(
                "an assistant's turn does not end with a special token, so no model could learn to "
                "stop"
            )
        turn = text.turns[0]
        steady = template.has_constant_prompt and not template.looks_ahead
        if steady and blocks and turn.start == blocks[0][0] and turn.spans == blocks:
            prompt = whole[: turn.start]
            self._header = prompt[self._encoder.start_of_last_special(prompt) or 0 :]


def _reasoning(message: Message) -> str:
    """Return an assistant's reasoning: of a key of its own, or what its text has before the end of
    reasoning."""
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            return str(message[key]).strip("\n")
    before, end, _ = message["content"].rpartition(END_OF_REASONING)
    return before.split("<think>")[-1].strip("\n") if end else ""


def _encoded(ids: list[int], trained: Spans, held_special_text: bool) -> Encoded:
    mask = np.zeros(len(ids), dtype=np.bool_)
    for first, stop in trained:
        mask[first:stop] = True
    mask[:1] = False  # nothing stands before the first token to predict it from
    return Encoded(np.array(ids, dtype=np.uint32), mask, held_special_text)


def _template_error(finding: str) -> UserError:
    return UserError(
        f"The chat template cannot be used for training: {finding}. Give another one in "
        "data.chat_template: "
        "a Jinja file that writes each assistant turn as "
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}."
    )
