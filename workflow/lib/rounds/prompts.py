"""Prompts of rows: the tokens before the last trained turn, as training has them.

A row's place in the order of the rounds is a pure function of the seed. Rows that the split holds
out, by the tokens of their prompts, are no training prompts."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from workflow.lib.data.encoding.row_values import RowError
from workflow.lib.data.reading.data_file import read_chunks
from workflow.lib.data.reading.row_chunks import BrokenRow, Row
from workflow.lib.data.reading.sources import Source
from workflow.lib.data.tokens.corpus import Encoding, beginning
from workflow.lib.data.tokens.splits import drawn
from workflow.lib.data.tokens.token_store import Document, TokenStore
from workflow.lib.rounds.answers import AnsweredPrompt
from workflow.lib.settings.rounds import AnswersConfig
from workflow.lib.system.errors import setting_error

TOO_LONG = "prompt leaves less room than answers.max_new_tokens"
HELDOUT, NO_PROMPT = "held out", "no prompt before the answer"
ReadRow = tuple[int, str, Row | BrokenRow]


@dataclass
class Prompts:
    """Chooses prompts of the rows of both splits. left_out: training rows of the round without a
    prompt, by reason."""

    splits: Mapping[str, Sequence[Source]]
    encodings: Mapping[str, Encoding]
    tokens: TokenStore
    tokenizer: PreTrainedTokenizerBase
    settings: AnswersConfig
    left_out: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._heldout = {_cut(document).tobytes() for document in self.tokens.heldout_documents()}

    def chosen(self) -> list[AnsweredPrompt]:
        """Return the round's training prompts, then the held-out ones. Raises `UserError` if one
        of both has none."""
        prompts = [*self._train(), *self._heldout_prompts()]
        reasons = ", ".join(f"{count}: {reason}" for reason, count in self.left_out.most_common(3))
        for split in ("train", "heldout") if self.settings.prompts_per_round else ("heldout",):
            if not any(prompt.split == split for prompt in prompts):
                raise setting_error(
                    "answers.round",
                    self.settings.round,
                    f"no row of data.{split} has a prompt that can be answered ({reasons})",
                    "Give rows with a prompt and an answer (columns prompt and completion, or "
                    "messages) and data.loss_on: completions, raise data.seq_len, or lower "
                    "answers.max_new_tokens",
                )
        return prompts

    def _train(self) -> Iterator[AnsweredPrompt]:
        rows = self._rows("train")
        count = min(self.settings.prompts_per_round, len(rows))
        for number in _row_numbers(self.settings, len(rows), count=count):
            try:
                yield self._prompt("train", rows[number], wants_heldout=False)
            except RowError as error:
                self.left_out[str(error).split(":")[0]] += 1

    def _heldout_prompts(self) -> Iterator[AnsweredPrompt]:
        split = "heldout" if "heldout" in self.splits else "train"
        rows, remaining = self._rows(split), self.settings.heldout_prompts
        for number in drawn(len(rows), total=len(rows), seed=self.settings.seed).tolist():
            if not remaining:
                return
            try:
                yield self._prompt("heldout", rows[number], wants_heldout=True)
                remaining -= 1
            except RowError:
                continue

    def _rows(self, split: str) -> list[ReadRow]:
        rows: list[ReadRow] = []
        for number, source in enumerate(self.splits[split]):
            for file in source.files:
                chunks = read_chunks(file.path, setting=f"data.{split}", file_type=file.file_type)
                rows += ((number, file.file, row) for chunk in chunks for row in chunk.rows())
        return rows

    def _prompt(
        self, split: Literal["train", "heldout"], row: ReadRow, *, wants_heldout: bool
    ) -> AnsweredPrompt:
        """Return the prompt of a row; raises `RowError` if it has none of this split."""
        source, file, content = row
        if isinstance(content, BrokenRow):
            raise RowError(content.reason)
        files_split = split if split in self.splits else "train"
        begun = beginning(self.encodings[files_split])(source, content)
        encoded = begun.encode()[-1]
        ids = _cut((encoded.ids, encoded.mask))
        if len(ids) < 2:
            raise RowError(NO_PROMPT)
        if (ids.tobytes() in self._heldout) != wants_heldout:
            raise RowError(HELDOUT)
        if len(ids) > self.tokens.seq_len - self.settings.max_new_tokens:
            raise RowError(TOO_LONG)
        values = json.dumps(content.value, default=str)
        return AnsweredPrompt(
            split=split,
            file=file,
            row=content.number,
            values=json.loads(values, parse_constant=lambda _: None),  # NaN and infinities
            prompt=ids.tolist(),
            text=str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)),
        )


def _cut(document: Document) -> Any:
    """Return the token ids before the last trained turn."""
    ids, mask = document
    if not mask.any():
        return ids
    last = len(mask) - 1 - int(np.argmax(mask[::-1]))
    gaps = np.flatnonzero(~mask[:last])
    return np.ascontiguousarray(ids[: int(gaps[-1]) + 1 if len(gaps) else 0], dtype=np.uint32)


def _row_numbers(settings: AnswersConfig, rows: int, *, count: int) -> Iterator[int]:
    """Yield the numbers of a round's rows: every round takes the next ones of a shuffled pass."""
    first = (settings.round - 1) * count
    orders: dict[int, Any] = {}
    for position in range(first, first + count):
        number, at = divmod(position, rows)
        if number not in orders:
            orders[number] = drawn(rows, total=rows, seed=[settings.seed, number])
        yield int(orders[number][at])
