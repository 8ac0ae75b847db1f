"""Conversations and texts to token ids and loss masks, through the tokenizer's chat template.

What an assistant says is trained, its end-of-turn token included. Where it stands is told by the
template's `{% generation %}` blocks; a template without them is rendered up to each assistant turn
instead, and the tokens of that prompt must begin the tokens of the whole (the prefix property).
Masks say which token is a prediction target, so the first token of a document is never one.
"""

import re
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from workflow.lib.encoding import SafeEncoder
from workflow.lib.errors import UserError
from workflow.lib.samples import Message, RowError, Sample

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Templates such as Llama 3's write today's date. The same data must give the same tokens tomorrow, so
# they are given this day (the default in Llama 3.2's template): the macro shadows Transformers' function.
FIXED_DATE = "2024-07-26"
DATE_MACRO = (
    "{% macro strftime_now(format) %}{{ format | replace('%Y', '2024') | replace('%y', '24')"
    " | replace('%m', '07') | replace('%B', 'July') | replace('%b', 'Jul') | replace('%d', '26')"
    " | replace('%A', 'Friday') | replace('%a', 'Fri') | replace('%H', '12') | replace('%M', '00')"
    " | replace('%S', '00') }}{% endmacro %}"
)
PROBE = [{"role": "user", "content": "ping"}, {"role": "assistant", "content": "pong"}]


@dataclass(frozen=True)
class Encoded:
    """A document: token ids uint32 and loss mask bool, both of shape (length,); False at position 0."""

    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.bool_]
    held_special_text: bool
    """The data spelled a special token; it was encoded as ordinary text."""


class SampleEncoder:
    """Encodes samples; `chat_template` may be None if all samples are texts."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None, train_all: bool
    ) -> None:
        self._encoder = SafeEncoder(tokenizer)
        self._train_all = train_all
        self._bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self._eos = [tokenizer.eos_token_id]
        self._variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._has_blocks = bool(chat_template and GENERATION_BLOCK.search(chat_template))
        self._template = None if chat_template is None else _with_fixed_date(chat_template)
        if self._template is not None:
            self._check_template()

    def encode(self, sample: Sample) -> Encoded:
        """Return the sample's tokens and mask. Raises `RowError` if the template or the mask fails."""
        if isinstance(sample, str):
            return self._encode_text(sample)
        return self._encode_chat(sample)

    def _encode_text(self, text: str) -> Encoded:
        """Every token is trained; bos (if the tokenizer has one) and eos stand around the text once."""
        ids = [*self._bos, *self._encoder.encode_plain(text).ids, *self._eos]
        return _encoded(ids, np.ones(len(ids), dtype=np.bool_), self._encoder.holds_special(text))

    def _encode_chat(self, messages: list[Message]) -> Encoded:
        guarded = any(self._encoder.holds_special(message["content"]) for message in messages)
        if guarded:
            messages = [{**m, "content": self._encoder.guard(m["content"])} for m in messages]
        ids, mask = self._find_answers(messages, guarded=guarded)
        return _encoded(ids, np.ones_like(mask) if self._train_all else mask, guarded)

    def _find_answers(
        self, messages: list[Message], *, guarded: bool
    ) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Return the conversation's token ids, and the mask of what the assistant says."""
        find = self._mask_from_blocks if self._has_blocks else self._mask_from_prefixes
        ids, mask = find(messages, guarded=guarded)
        if not mask[1:].any():
            raise RowError("no trained token: the chat template marks none as the assistant's")
        return ids, mask

    def _mask_from_blocks(
        self, messages: list[Message], *, guarded: bool
    ) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Mark the tokens of the template's `{% generation %}` blocks."""
        text, spans = self._render(messages)
        encoding = self._encoder.encode_rendered(text, guarded=guarded)
        mask = np.zeros(len(encoding.ids), dtype=np.bool_)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        for start, end in spans:
            first, stop = _token_span(offsets, start, end)
            mask[first : self._with_end_of_turn(encoding.ids, first, stop)] = True
        return encoding.ids, mask

    def _mask_from_prefixes(
        self, messages: list[Message], *, guarded: bool
    ) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Mark what follows each assistant turn's prompt, up to the turn's end."""
        ids = self._encoder.encode_rendered(self._render(messages)[0], guarded=guarded).ids
        mask = np.zeros(len(ids), dtype=np.bool_)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, _ = self._render(messages[:place], add_generation_prompt=True)
                turn, _ = self._render(messages[: place + 1])
                first = self._prefix_length(prompt, ids, guarded=guarded)
                stop = self._prefix_length(turn, ids, guarded=guarded)
                mask[first : self._without_tail(ids, first, stop)] = True
        return ids, mask

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

    def _render(
        self, messages: list[Message], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text and the character spans of its generation blocks."""
        try:
            rendered: Any = render_jinja_template(  # its annotation says str, it returns two lists
                [messages],
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=self._has_blocks,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise RowError(f"refused by the chat template: {error}") from None
        texts, spans = rendered
        return texts[0], spans[0] if spans else []

    def _check_template(self) -> None:
        """Render one exchange: its answer must be found, and must end with a special token."""
        try:
            ids, mask = self._find_answers(PROBE, guarded=False)
        except RowError as error:
            raise _template_error(
                f"a question and an answer cannot be rendered ({error})"
            ) from None
        if ids[int(np.flatnonzero(mask)[-1])] not in self._encoder.special_ids:
            raise _template_error(
                "an assistant's turn does not end with a special token, so no model could learn to stop"
            )


def _with_fixed_date(chat_template: str) -> str:
    """Give a template that writes the date the same date always."""
    return DATE_MACRO + chat_template if "strftime_now" in chat_template else chat_template


def _token_span(offsets: npt.NDArray[np.int64], start: int, end: int) -> tuple[int, int]:
    """Return the tokens [first, stop) that touch the characters [start, end); offsets are (tokens, 2)."""
    touching = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
    return (int(touching[0]), int(touching[-1]) + 1) if len(touching) else (0, 0)


def _encoded(ids: list[int], mask: npt.NDArray[np.bool_], held_special_text: bool) -> Encoded:
    targets = mask.copy()
    targets[:1] = False  # nothing stands before the first token to predict it from
    return Encoded(np.array(ids, dtype=np.uint32), targets, held_special_text)


def _template_error(finding: str) -> UserError:
    return UserError(
        f"The chat template cannot be used for training: {finding}. Give another one in data.chat_template: "
        "a Jinja file that writes each assistant turn as "
        "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}."
    )
