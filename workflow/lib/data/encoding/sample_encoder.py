"""Conversations, texts and ready token ids to documents: token ids and loss masks.

The assistant's turns are trained, end-of-turn tokens included; `trained_turns` finds them in the
rendered text. If inference gives a turn another prompt than the conversation, the turn becomes an
example of its own: its prompt and itself as in inference. Masks mark prediction targets, so the
first token of a document is never one."""

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal
from unicodedata import is_normalized, normalize

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.chat_template import ChatTemplate, Spans
from workflow.lib.data.encoding.probe_conversations import OFFERING_PROBE, PROBE, PROBE_TEXT, PROBES
from workflow.lib.data.encoding.row_formats import Sample, Weighted
from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.encoding.safe_encoder import Ids, SafeEncoder, TextTokens, encoding
from workflow.lib.data.encoding.template_texts import Turn, TurnText
from workflow.lib.data.encoding.token_rows import TokenRow
from workflow.lib.data.encoding.trained_turns import LossOn, Rendered, TurnRenderer
from workflow.lib.settings.data import TextKind
from workflow.lib.system.errors import UserError, setting_error

# Facts on a row that its user should know: its first turn is not trained, as it has no prompt; the
# tokenizer strips blanks around an answer; the answer begins with its prompt; the tokenizer does
# not know a trained character.
Note = Literal["begin_untrained", "lost_blanks", "repeat_prompt", "unknown_characters"]
SHORTEST_PROMPT = 8  # characters; an answer may begin with a shorter one by chance


@dataclass(frozen=True)
class Encoded:
    """A document: token ids uint32 and loss mask bool, (length,); position 0 is False."""

    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.bool_]
    held_special_text: bool  # the data spelled a special token that a template writes
    unrendered: frozenset[TextKind] = frozenset()
    """Allowed kinds of text that the template left out of the conversation."""
    weights: npt.NDArray[np.float32] | None = None
    """Of the tokens in the loss, (length,), 0 where the mask is False; None: the mask itself."""
    notes: frozenset[Note] = frozenset()
    desirable: bool = True  # of a rated answer: whether it is good
    composed: npt.NDArray[np.uint32] | None = None
    """Token ids of the same text in NFC, to compare it with others; None: the ids themselves."""

    def weighted(self, weight: float) -> "Encoded":
        """Return the document with its loss weights multiplied by `weight`."""
        weights = self.mask.astype(np.float32) if self.weights is None else self.weights
        return replace(self, weights=weights * np.float32(weight))


class SampleEncoder:
    """Encodes samples. chat_template: None without conversations; tool_template: of rows with
    tools, None: the same; template_kwargs: defaults; allow_unrendered: kinds of text that may be
    left out; special_tokens: meaning of spelled ones."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None,
        tool_template: str | None = None,
        loss_on: LossOn,
        template_kwargs: Mapping[str, object] | None = None,
        allow_unrendered: Collection[TextKind] = (),
        special_tokens: Literal["text", "tokens"] = "text",
        usable_tokens: int | None = None,
    ) -> None:
        self._encoder = SafeEncoder(tokenizer)
        self._vocab_size = len(tokenizer)
        self._usable_tokens = self._vocab_size if usable_tokens is None else usable_tokens
        self._loss_on = loss_on
        self._reads_tokens = special_tokens == "tokens"
        bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        with_bos = encoding(tokenizer.backend_tokenizer, "x", add_special_tokens=True).ids[:1]
        adds_bos = bos is not None and list(with_bos) == [bos]
        # the tokenizer itself puts it before a text
        self._bos = array("I", [bos] if adds_bos else [])
        self._unk: str | None = tokenizer.special_tokens_map.get("unk_token")
        used_ids = {bos, self._eos, tokenizer.pad_token_id}  # GPT-2's unk_token is its eos_token
        self._unk_id = None if tokenizer.unk_token_id in used_ids else tokenizer.unk_token_id
        texts = {False: chat_template, True: tool_template}
        templates = {
            for_tools: ChatTemplate(
                text, special_tokens=tokenizer.special_tokens_map, template_kwargs=template_kwargs
            )
            for for_tools, text in texts.items()
            if text is not None
        }
        _check_arguments(template_kwargs or {}, list(templates.values()))
        make = partial(
            TurnRenderer,
            encoder=self._encoder,
            allowed=allow_unrendered,
            reads_tokens=self._reads_tokens,
        )
        self._renderers = {key: make(t, loss_on=loss_on) for key, t in templates.items()}
        self._probers = {key: make(t, loss_on="completions") for key, t in templates.items()}
        for for_tools, prober in self._probers.items():
            self._check_template(prober, OFFERING_PROBE if for_tools else PROBE)

    def encode(self, sample: Sample) -> list[Encoded]:
        """Return the sample's tokens and masks: one example, or several if turns need prompts of
        their own. Raises `RowError` if the template or the mask fails."""
        return self.begin(sample)()

    def begin(self, sample: Sample) -> Callable[[], list[Encoded]]:
        """Return the encoder of the sample; a conversation is rendered now. Both raise `RowError`
        as `encode`. A block of rows rendered before it is encoded takes four fifths of the time, by
        the processor's caches."""
        begun = self._begin(sample)
        is_whole = self._usable_tokens == self._vocab_size and self._unk_id is None
        return begun if is_whole else partial(self._with_checked_ids, begun)

    def _with_checked_ids(self, begun: Callable[[], list[Encoded]]) -> list[Encoded]:
        """Return the encoded examples, with a note on trained characters that the tokenizer does
        not know; raises `RowError` for a token without a row in the model."""
        examples = [
            replace(example, notes=example.notes | {"unknown_characters"})
            if np.any(example.mask & (example.ids == self._unk_id))
            else example
            for example in begun()
        ]
        largest = max(int(example.ids.max(initial=0)) for example in examples)
        if largest >= self._usable_tokens:
            raise RowError(
                f"token without a row: id {largest}, the model's embedding has "
                f"{self._usable_tokens} rows"
            )
        return examples

    def _begin(self, sample: Sample) -> Callable[[], list[Encoded]]:
        if isinstance(sample, Weighted):
            begun = self._begin(sample.sample)
            return lambda: [encoded.weighted(sample.weight) for encoded in begun()]
        if isinstance(sample, Conversation):
            rendered = _chosen(self._renderers, sample).render(sample)
            return partial(
                self._encode_chat, rendered, notes=_notes(sample), weights=sample.weights
            )
        if self._loss_on == "last_turn":
            raise RowError("no turns: data.loss_on = last_turn needs conversations")
        if isinstance(sample, TokenRow):
            return partial(self._encode_tokens, sample)
        return partial(self._encode_text, sample)

    def encoded_probes(self) -> list[dict[str, Any]]:
        """Return a text, and the `PROBES` that the template takes, with ids as trained (the JSON of
        `manifest_record.Probe`)."""
        text = {"text": PROBE_TEXT, "ids": self._encoder.encode_plain(PROBE_TEXT).ids.tolist()}
        chats = [
            {"messages": probe.messages, "tools": probe.tools, "ids": ids}
            for probe, ids, _ in self._answered_probes()
        ]
        return [text, *chats]

    def end_of_turn_ids(self) -> list[int]:
        """Return the special tokens that end trained turns; none without a template."""
        ends = {end for _, _, last_tokens in self._answered_probes() for end in last_tokens}
        return sorted(ends & self._encoder.special_ids)

    def written_date(self) -> str | None:
        """Return the date that the chat template writes into every document, if any."""
        for prober in self._probers.values():
            if date := prober.template.date_in(prober.whole(PROBE)):
                return date
        return None

    def _answered_probes(self) -> Iterator[tuple[Conversation, list[int], list[int]]]:
        """Yield each probe in the template's form, its ids, its trained turns' last tokens."""
        for probe in PROBES if self._renderers else ():
            try:
                adapted = _chosen(self._probers, probe).template.adapted(probe)
                yield adapted, *self._answered(probe)
            except RowError:
                continue  # a template may refuse system messages or tools, then data with them too

    def _answered(self, probe: Conversation) -> tuple[list[int], list[int]]:
        renderer = _chosen(self._probers, probe)
        texts = renderer.checked(probe)
        examples = self._examples(texts, guarded=False, weights=None)
        ends = [int(i) for e in examples for i in e.ids[e.mask & ~np.append(e.mask[1:], False)]]
        text = renderer.whole(probe)
        return self._encoder.encode_rendered(text, guarded=False).ids.tolist(), ends

    @cached_property
    def _template_tokens(self) -> frozenset[str]:
        """Special tokens that the template writes in probes."""
        written = {self._eos}
        for _, ids, ends in self._answered_probes():
            written |= {*ids, *ends}
        return self._encoder.spellings(written)

    def _encode_text(self, text: str) -> list[Encoded]:
        """Encode a text, all of it trained: bos first if the tokenizer adds one, eos last."""
        spelled = self._encoder.specials_in(text) - {self._unk}
        if self._reads_tokens:
            ids = self._encoder.encode_rendered(text, guarded=False).ids
        else:
            ids = self._encoder.encode_plain(text).ids
        eos = array("I", [self._eos])
        before = self._bos if ids[:1] != self._bos else array("I")
        after = eos if ids[-1:] != eos else array("I")
        ids = before + ids + after
        encoded = _encoded(ids, [(0, len(ids))], held_special_text=bool(spelled))
        composed = self._composed(text, guarded=False)
        if composed is None:
            return [encoded]
        return [replace(encoded, composed=np.array(before + composed + after))]

    def _composed(self, text: str, *, guarded: bool) -> "Ids | None":
        """Return the ids of a text in NFC; None if it is in this form."""
        if text.isascii() or is_normalized("NFC", text):
            return None
        return self._encoder.encode_rendered(normalize("NFC", text), guarded=guarded).ids

    def _encode_tokens(self, row: TokenRow) -> list[Encoded]:
        """Take the ids unchanged, without further tokens before or after."""
        if min(row.ids) < 0 or max(row.ids) >= self._vocab_size:
            unknown = next(token for token in row.ids if not 0 <= token < self._vocab_size)
            raise RowError(
                f"unknown token: id {unknown}, the tokenizer has 0 to {self._vocab_size - 1}"
            )
        if self._loss_on == "all":
            if not all((row.trained or [])[1:]):
                raise RowError(
                    "labels: they name tokens that are not trained, but data.loss_on = all trains "
                    "every token; leave them out (data.leave_out: [labels, loss_mask])"
                )
            mask = np.ones(len(row.ids), dtype=np.bool_)
        elif row.trained is None:
            raise RowError("no labels: token ids need labels or loss_mask, or data.loss_on = all")
        else:
            mask = np.array(row.trained, dtype=np.bool_)
        if not mask[1:].any():
            raise RowError("no trained token: the labels name none behind the first token")
        mask[:1] = False
        return [Encoded(np.array(row.ids, dtype=np.uint32), mask, held_special_text=False)]

    def _encode_chat(
        self, rendered: Rendered, *, notes: frozenset[Note], weights: list[float] | None
    ) -> list[Encoded]:
        if self._loss_on == "all":
            text, notes = rendered.texts[0].text, notes - {"begin_untrained"}
            ids = self._encoder.encode_rendered(text, guarded=rendered.guarded).ids
            examples = [_encoded(ids, [(0, len(ids))])]
        else:
            examples = self._examples(rendered.texts, guarded=rendered.guarded, weights=weights)
        held_special_text = bool(rendered.special_texts) and bool(
            rendered.special_texts & self._template_tokens
        )
        if not (held_special_text or rendered.unrendered or notes):
            return examples
        return [
            replace(
                example,
                held_special_text=held_special_text,
                unrendered=rendered.unrendered,
                notes=example.notes | notes,
            )
            for example in examples
        ]

    def _examples(
        self, texts: Sequence[TurnText], *, guarded: bool, weights: list[float] | None
    ) -> list[Encoded]:
        """Return the examples of a conversation's texts; `weights`: by message."""
        examples: list[Encoded] = []
        tokens: TextTokens | None = None
        for text in texts:
            turn = text.turns[0].start if text.turns else 0
            tokens = self._encoder.tokens(text.text, guarded=guarded, before=tokens, turn=turn)
            examples += self._examples_of(text, tokens, guarded=guarded, weights=weights)
        return examples

    def _examples_of(
        self, text: TurnText, tokens: TextTokens, *, guarded: bool, weights: list[float] | None
    ) -> list[Encoded]:
        """Return the example of a text. Turns whose prompt has other tokens alone than in the text
        precede it as examples of their own."""
        examples, spans, span_weights = [], [], []
        notes: set[Note] = set()
        for turn in text.turns:
            weight = None if weights is None else weights[turn.index]
            if self._encoder.is_prompt(tokens, turn.start, guarded=guarded):
                span = tokens.turn_span(turn.start, turn.stop)
                spans.append(span)
                if tokens.strips_blanks(turn.start, span):
                    notes.add("lost_blanks")
                span_weights += [] if weight is None else [weight]
            else:
                own_example = self._own_example(text.text, turn, guarded)
                examples.append(own_example if weight is None else own_example.weighted(weight))
        if spans or not text.turns:
            encoded = _encoded(tokens.ids, spans, span_weights)
            composed = self._composed(text.text, guarded=guarded)
            if composed is not None:
                encoded = replace(encoded, composed=np.array(composed))
            if notes:
                encoded = replace(encoded, notes=frozenset(notes))
            examples.append(encoded)
        return examples

    def _own_example(self, text: str, turn: Turn, guarded: bool) -> Encoded:
        """Return the tokens of the prompt and of the turn, which is encoded by itself."""
        prompt = self._encoder.encode_rendered(text[: turn.start], guarded=guarded).ids
        try:
            answer = self._encoder.encode_answer(text[turn.start : turn.stop], guarded=guarded)
        except ValueError as error:
            raise RowError(f"turn not found: {error}") from None
        ids = prompt + answer
        return _encoded(ids, [(len(prompt), len(ids))])

    def _check_template(self, renderer: TurnRenderer, probe: Conversation) -> None:
        """Render one exchange: its answer must be found, and must end with a special token."""
        try:
            renderer.checked(probe)
        except RowError as error:
            raise UserError(
                "The chat template cannot be used for training: a question and an answer cannot be "
                f"rendered ({error}). Give another one in data.chat_template: a Jinja file that "
                "writes each assistant turn as "
                "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}."
            ) from None


def _chosen(renderers: Mapping[bool, TurnRenderer], conversation: Conversation) -> TurnRenderer:
    """Return the renderer of a conversation: that for tools if it offers some. Transformers chooses
    the template `tool_use` in the same way."""
    assert False in renderers, "conversations need a chat template"
    return renderers[bool(conversation.tools) and True in renderers]


def _notes(conversation: Conversation) -> frozenset[Note]:
    """Return the notes that the messages alone give."""
    notes: set[Note] = {"begin_untrained"} if conversation.trained[0] else set()
    first = conversation.trained.index(True, 1) if any(conversation.trained[1:]) else 0
    if first:
        prompt = conversation.messages[first - 1]["content"].strip()
        answer = conversation.messages[first]["content"].lstrip()
        if len(prompt) >= SHORTEST_PROMPT and answer.startswith(prompt):
            notes.add("repeat_prompt")
    return frozenset(notes)


def _check_arguments(
    template_kwargs: Mapping[str, object], templates: Sequence[ChatTemplate]
) -> None:
    for name, value in template_kwargs.items():
        faults = [template.unknown_argument([name]) for template in templates]
        if faults and faults[0] is not None and None not in faults:
            raise setting_error(
                f"data.template_kwargs.{name}", value, faults[0], "Remove it, or correct the name"
            )


def _encoded(
    ids: Sequence[int] | npt.NDArray[np.uint32],
    trained: Spans,
    span_weights: Sequence[float] = (),
    *,
    held_special_text: bool = False,
) -> Encoded:
    """Return a document with these trained spans, each of weight 1 by default."""
    weights = np.zeros(len(ids), dtype=np.float32)
    for (first, stop), weight in zip(trained, span_weights or [1.0] * len(trained), strict=True):
        weights[first:stop] = weight
    weights[:1] = 0.0  # no token before the first one can predict it
    encoded = Encoded(np.array(ids, dtype=np.uint32), weights > 0, held_special_text)
    return replace(encoded, weights=weights) if any(w != 1 for w in span_weights) else encoded
