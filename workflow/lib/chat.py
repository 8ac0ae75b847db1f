"""Conversations, texts and ready token ids to documents: token ids and loss masks.

What an assistant says is trained, its end-of-turn token included. Where it stands is told by the
template's `{% generation %}` blocks; a template without them is rendered up to each assistant turn
instead, and the tokens of that prompt must begin the tokens of the whole (the prefix property).
Masks say which token is a prediction target, so the first token of a document is never one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workflow.lib.encoding import SafeEncoder, token_span
from workflow.lib.errors import UserError
from workflow.lib.messages import Conversation, RowError, texts_of
from workflow.lib.rendering import ChatTemplate, Spans, with_texts
from workflow.lib.samples import Sample, TokenRow

LossOn = Literal["completions", "last_turn", "all"]

PROBE = Conversation(
    [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}],
    [False, True],
)


@dataclass(frozen=True)
class Encoded:
    """A document: token ids uint32 and loss mask bool, both of shape (length,); False at position 0."""

    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.bool_]
    held_special_text: bool
    """The data spelled a special token; it was encoded as ordinary text."""


@dataclass(frozen=True)
class _Rendered:
    """A conversation as the template has written it; guarded: with its data's special tokens spelled otherwise."""

    template: ChatTemplate
    conversation: Conversation
    guarded: bool
    text: str
    blocks: Spans


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
        if chat_template is not None:
            variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
            self._template = ChatTemplate(chat_template, variables=variables)
            self._check_template(self._template)

    def encode(self, sample: Sample) -> Encoded:
        """Return the sample's tokens and mask. Raises `RowError` if the template or the mask fails."""
        return self.begin(sample)()

    def begin(self, sample: Sample) -> Callable[[], Encoded]:
        """Return what encodes the sample; of a conversation, rendered now. Both raise `RowError` as `encode` does.

        To begin many samples and then end them takes four fifths of the time of one after the other: template and
        tokenizer do not put each other out of the processor's caches.
        """
        if isinstance(sample, Conversation):
            assert self._template is not None, "conversations need a chat template"
            return partial(self._encode_chat, self._render(self._template, sample))
        if self._loss_on == "last_turn":
            raise RowError("no turns: data.loss_on = last_turn needs conversations")
        if isinstance(sample, TokenRow):
            return partial(self._encode_tokens, sample)
        return partial(self._encode_text, sample)

    def _encode_text(self, text: str) -> Encoded:
        """Every token is trained; bos (if the tokenizer has one) and eos stand around the text once."""
        ids = [*self._bos, *self._encoder.encode_plain(text).ids, *self._eos]
        return _encoded(ids, [(0, len(ids))], self._encoder.holds_special(text))

    def _encode_tokens(self, row: TokenRow) -> Encoded:
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
        return Encoded(np.array(row.ids, dtype=np.uint32), mask, held_special_text=False)

    def _render(self, template: ChatTemplate, conversation: Conversation) -> _Rendered:
        template.check_tools(conversation)
        guarded = self._holds_special(conversation)
        if guarded:
            conversation = with_texts(conversation, self._encoder.guard)
        text, blocks = template.render(conversation.messages, tools=conversation.tools)
        return _Rendered(template, conversation, guarded, text, blocks)

    def _encode_chat(self, rendered: _Rendered) -> Encoded:
        if self._loss_on == "all":
            ids = self._encoder.encode_rendered(rendered.text, guarded=rendered.guarded).ids
            return _encoded(ids, [(0, len(ids))], rendered.guarded)
        return _encoded(*self._find_answers(rendered), rendered.guarded)

    def _holds_special(self, conversation: Conversation) -> bool:
        texts = texts_of([conversation.messages, conversation.tools])
        holds = self._encoder.holds_special
        return holds("\n".join(texts)) and any(map(holds, texts))  # one search where none has any

    def _find_answers(self, rendered: _Rendered) -> tuple[list[int], Spans]:
        """Return the conversation's token ids, and the tokens [first, stop) that are trained."""
        trained = rendered.conversation.trained
        turns = [place for place, is_trained in enumerate(trained) if is_trained]
        if self._loss_on == "last_turn":
            turns = turns[-1:]
        has_blocks = rendered.template.has_blocks
        find = self._spans_from_blocks if has_blocks else self._spans_from_prefixes
        ids, spans = find(rendered, turns)
        if not any(stop > max(first, 1) for first, stop in spans):
            raise RowError("no trained token: the chat template marks none as the assistant's")
        return ids, spans

    def _spans_from_blocks(self, rendered: _Rendered, turns: list[int]) -> tuple[list[int], Spans]:
        """Return the token ids, and the tokens [first, stop) of the `{% generation %}` blocks of these turns."""
        encoding = self._encoder.encode_rendered(rendered.text, guarded=rendered.guarded)
        ids = encoding.ids  # a list made anew at each look
        spans = []
        for start, end in _blocks_of(turns, rendered.conversation, rendered.blocks):
            first, stop = token_span(encoding, start, end)
            spans.append((first, self._with_end_of_turn(ids, first, stop)))
        return ids, spans

    def _spans_from_prefixes(
        self, rendered: _Rendered, turns: list[int]
    ) -> tuple[list[int], Spans]:
        """Return the token ids, and the tokens that follow each of these turns' prompts, up to the turn's end."""
        messages, tools = rendered.conversation.messages, rendered.conversation.tools
        template, guarded = rendered.template, rendered.guarded
        ids = self._encoder.encode_rendered(rendered.text, guarded=guarded).ids
        spans = []
        for place in turns:
            prompt, _ = template.render(messages[:place], tools=tools, add_generation_prompt=True)
            turn, _ = template.render(messages[: place + 1], tools=tools)
            first = self._prefix_length(prompt, ids, guarded=guarded)
            stop = self._prefix_length(turn, ids, guarded=guarded)
            spans.append((first, self._without_tail(ids, first, stop)))
            if first >= spans[-1][1]:
                raise RowError(
                    f"no trained token: the chat template writes message {place + 1} empty"
                )
        return ids, spans

    def _prefix_length(self, text: str, ids: list[int], *, guarded: bool) -> int:
        prefix = self._encoder.encode_rendered(text, guarded=guarded).ids
        if prefix != ids[: len(prefix)]:
            raise RowError(
                "turn not found: the chat template renders a turn differently once others follow; "
                "give a template with {% generation %} blocks in data.chat_template"
            )
        return len(prefix)

    def _with_end_of_turn(self, ids: list[int], first: int, stop: int) -> int:
        """Extend a span by the special token behind it, where the template left it out of the block."""
        special = self._encoder.special_ids
        ends_open = stop > first and ids[stop - 1] not in special
        return stop + 1 if ends_open and stop < len(ids) and ids[stop] in special else stop

    def _without_tail(self, ids: list[int], first: int, stop: int) -> int:
        """Cut what the template writes behind the end-of-turn token (a line feed): it is never generated."""
        special = self._encoder.special_ids
        return next((i + 1 for i in range(stop - 1, first - 1, -1) if ids[i] in special), stop)

    def _check_template(self, template: ChatTemplate) -> None:
        """Render one exchange: its answer must be found, and must end with a special token."""
        try:
            ids, spans = self._find_answers(self._render(template, PROBE))
        except RowError as error:
            raise _template_error(
                f"a question and an answer cannot be rendered ({error})"
            ) from None
        if ids[max(stop for _, stop in spans) - 1] not in self._encoder.special_ids:
            raise _template_error(
                "an assistant's turn does not end with a special token, so no model could learn to stop"
            )


def _blocks_of(
    turns: list[int], conversation: Conversation, blocks: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the generation blocks of these turns; a template may write a turn in several, then all must be wanted."""
    answers = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if turns == answers:
        return blocks
    if len(blocks) != len(answers):
        raise RowError(
            f"turn not found: the chat template has {len(blocks)} generation blocks for {len(answers)} "
            "assistant turns, so those to be trained cannot be told from the others"
        )
    return [block for answer, block in zip(answers, blocks, strict=True) if answer in turns]


def _encoded(ids: list[int], trained: Spans, held_special_text: bool) -> Encoded:
    mask = np.zeros(len(ids), dtype=np.bool_)
    for first, stop in trained:
        mask[first:stop] = True
    mask[:1] = False  # nothing stands before the first token to predict it from
    return Encoded(np.array(ids, dtype=np.uint32), mask, held_special_text)


def _template_error(finding: str) -> UserError:
    return UserError(
        f"The chat template cannot be used for training: {finding}. Give another one in data.chat_template: "
        "a Jinja file that writes each assistant turn as "
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}."
    )
