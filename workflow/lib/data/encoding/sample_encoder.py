"""Conversations, texts and ready token ids to documents: token ids and loss masks.

What an assistant says is trained, its end-of-turn token included; `trained_turns` finds where it
stands in the rendered text. A turn whose prompt has other tokens there than inference gives it
becomes an example of its own: the prompt and the turn as inference has them. Masks say which token
is a prediction target, so the first token of a document is never one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from workflow.lib.data.encoding.chat_messages import Conversation, RowError
from workflow.lib.data.encoding.chat_template import ChatTemplate, Spans
from workflow.lib.data.encoding.probes import PROBE, PROBE_TEXT, PROBES, ChatProbe, TextProbe
from workflow.lib.data.encoding.row_formats import Sample
from workflow.lib.data.encoding.safe_encoder import SafeEncoder, token_span
from workflow.lib.data.encoding.token_rows import TokenRow
from workflow.lib.data.encoding.trained_turns import (
    LossOn,
    Rendered,
    Turn,
    TurnRenderer,
    TurnText,
)
from workflow.lib.system.errors import UserError


@dataclass(frozen=True)
class Encoded:
    """A document: token ids uint32 and loss mask bool, both of shape (length,).

    The mask is False at position 0.
    """

    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.bool_]
    held_special_text: bool
    """The data spelled a special token; it was encoded as ordinary text."""


class SampleEncoder:
    """Encodes samples; `chat_template` may be None if no sample is a conversation.

    template_kwargs: arguments of the template for every row that does not say otherwise.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None,
        loss_on: LossOn,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        self._encoder = SafeEncoder(tokenizer)
        self._vocab_size = len(tokenizer)
        self._loss_on = loss_on
        self._bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._eos = [tokenizer.eos_token_id]
        self._renderer: TurnRenderer | None = None
        if chat_template is not None:
            variables = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
            template = ChatTemplate(chat_template, variables=variables)
            self._renderer = TurnRenderer(template, encoder=self._encoder, loss_on=loss_on)
            self._check_template(self._renderer)

    def encode(self, sample: Sample) -> list[Encoded]:
        """Return the sample's tokens and masks.

        These are one example, or several where turns need prompts of their own. Raises `RowError`
        if the template or the mask fails.
        """
        return self.begin(sample)()

    def begin(self, sample: Sample) -> Callable[[], list[Encoded]]:
        """Return what encodes the sample; a conversation is rendered now.

        Both raise `RowError` as `encode` does. To begin many samples and then end them takes four
        fifths of the time of one after the other: template and tokenizer do not put each other out
        of the processor's caches.
        """
        if isinstance(sample, Conversation):
            assert self._renderer is not None, "conversations need a chat template"
            return partial(self._encode_chat, self._renderer.render(sample))
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
        """Return the special tokens that end trained turns; none without a template."""
        ends = {end for _, _, last_tokens in self._answered_probes() for end in last_tokens}
        return sorted(ends & self._encoder.special_ids)

    def _answered_probes(self) -> Iterator[tuple[Conversation, list[int], list[int]]]:
        """Yield each probe that the template takes, its ids, and its turns' last tokens.

        Only trained turns count.
        """
        if self._renderer is None:
            return
        for probe in PROBES:
            try:
                yield probe, *self._answered(self._renderer, probe)
            except RowError:
                continue  # a template may refuse system messages or tools, then data with them too

    def _answered(
        self, renderer: TurnRenderer, conversation: Conversation
    ) -> tuple[list[int], list[int]]:
        """Return the whole conversation's ids, and the last token of each trained turn.

        The conversation spells no special token.
        """
        template = renderer.template
        conversation = template.adapted(conversation)
        template.check_tools(conversation)
        whole, blocks = template.render(conversation.messages, tools=conversation.tools)
        turns = [index for index, is_trained in enumerate(conversation.trained) if is_trained]
        texts = renderer.turn_texts(conversation, whole, blocks, turns)
        examples = [e for text in texts for e in self._examples(text, guarded=False)]
        ends = [int(i) for e in examples for i in e.ids[e.mask & ~np.append(e.mask[1:], False)]]
        return self._encoder.encode_rendered(whole, guarded=False).ids, ends

    def _encode_text(self, text: str) -> list[Encoded]:
        """Encode a text, all of it trained, between bos (if the tokenizer has one) and eos."""
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

    def _encode_chat(self, rendered: Rendered) -> list[Encoded]:
        if self._loss_on == "all":
            ids = self._encoder.encode_rendered(
                rendered.texts[0].text, guarded=rendered.guarded
            ).ids
            return [_encoded(ids, [(0, len(ids))], rendered.guarded)]
        examples = [e for text in rendered.texts for e in self._examples(text, rendered.guarded)]
        if not any(encoded.mask.any() for encoded in examples):
            raise RowError("no trained token: the chat template marks none as the assistant's")
        return examples

    def _examples(self, text: TurnText, guarded: bool) -> list[Encoded]:
        """Return the text's example.

        A turn whose prompt has other tokens in it has one of its own before.
        """
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

    def _own_example(self, text: str, turn: Turn, guarded: bool) -> Encoded:
        """Return the prompt's tokens and behind them the turn's, which is encoded by itself."""
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
        """Extend a span by the special token behind it, if the template's block leaves it out."""
        special = self._encoder.special_ids
        ends_open = stop > first and ids[stop - 1] not in special
        return stop + 1 if ends_open and stop < len(ids) and ids[stop] in special else stop

    def _check_template(self, renderer: TurnRenderer) -> None:
        """Render one exchange: its answer must be found, and must end with a special token."""
        try:
            whole, blocks = renderer.template.render(PROBE.messages, tools=None)
            text = renderer.turn_texts(PROBE, whole, blocks, [1])[0]
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
        renderer.trust_blocks(whole, blocks, text.turns[0])


def _encoded(ids: list[int], trained: Spans, held_special_text: bool) -> Encoded:
    mask = np.zeros(len(ids), dtype=np.bool_)
    for first, stop in trained:
        mask[first:stop] = True
    mask[:1] = False  # nothing stands before the first token to predict it from
    return Encoded(np.array(ids, dtype=np.uint32), mask, held_special_text)


def _template_error(finding: str) -> UserError:
    return UserError(
        f"The chat template cannot be used for training: {finding}. Give another one in "
        "data.chat_template: a Jinja file that writes each assistant turn as "
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}."
    )
