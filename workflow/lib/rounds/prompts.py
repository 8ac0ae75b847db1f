"""Prompts of rows: the tokens before the last trained turn, as training has them.

A row's place in the order of the rounds is a pure function of the seed. Rows that the split holds
out, by the tokens of their prompts, are no training prompts."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
NO_PROMPT = "no prompt before the answer"
Split = Literal["train", "heldout"]
ReadRow = tuple[int, str, Row | BrokenRow]


@dataclass
class Prompts:
    """Chooses prompts of the rows of both splits. left_out: of each split rows that were tried and
    have none, by reason."""

    splits: Mapping[str, Sequence[Source]]
    encodings: Mapping[str, Encoding]
    tokens: TokenStore
    tokenizer: PreTrainedTokenizerBase
    settings: AnswersConfig

    def __post_init__(self) -> None:
        self.left_out: dict[str, Counter[str]] = {"train": Counter(), "heldout": Counter()}
        self._heldout = {_cut(document).tobytes() for document in self.tokens.heldout_documents()}

    def chosen(self) -> list[AnsweredPrompt]:
        """Return the round's training prompts, if it trains, then the held-out ones. Raises
        `UserError` if one of both has none."""
        train = self._of("train", _train_rows) if self.settings.prompts_per_round else []
        return train + self._of("heldout", _heldout_rows, most=self.settings.heldout_prompts)

    def _of(
        self,
        split: Split,
        numbers: Callable[[AnswersConfig, int], Iterable[int]],
        most: int | None = None,
    ) -> list[AnsweredPrompt]:
        """Return at most so many prompts of the rows with these numbers."""
        rows = self._rows(split if split in self.splits else "train")
        left_out, prompts = self.left_out[split], list[AnsweredPrompt]()
        for number in numbers(self.settings, len(rows)):
            try:
                prompts.append(self._prompt(split, rows[number]))
            except RowError as error:
                left_out[str(error).split(":")[0]] += 1
            if len(prompts) == most:
                break
        if not prompts:
            reasons = ", ".join(f"{count}: {reason}" for reason, count in left_out.most_common(3))
            raise setting_error(
                "answers.round",
                self.settings.round,
                f"no row of data.{split} has a prompt that can be answered ({reasons})",
                "Give rows with a prompt and an answer (columns prompt and completion, or "
                "messages) and data.loss_on: completions, raise data.seq_len, or lower "
                "answers.max_new_tokens",
            )
        return prompts

    def _rows(self, split: str) -> list[ReadRow]:
        rows: list[ReadRow] = []
        for number, source in enumerate(self.splits[split]):
            for file in source.files:
                chunks = read_chunks(file.path, setting=f"data.{split}", file_type=file.file_type)
                rows += ((number, file.file, row) for chunk in chunks for row in chunk.rows())
        return rows

    def _prompt(self, split: Split, row: ReadRow) -> AnsweredPrompt:
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
        if (own := "heldout" if ids.tobytes() in self._heldout else "train") != split:
            raise RowError(f"of the {own} split")
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


def _train_rows(settings: AnswersConfig, rows: int) -> Iterator[int]:
    """Yield the numbers of a round's rows: every round takes the next ones of a shuffled pass."""
    count = min(settings.prompts_per_round, rows)
    first = (settings.round - 1) * count
    orders: dict[int, Any] = {}
    for position in range(first, first + count):
        number, at = divmod(position, rows)
        if number not in orders:
            orders[number] = drawn(rows, total=rows, seed=[settings.seed, number])
        yield int(orders[number][at])


def _heldout_rows(settings: AnswersConfig, rows: int) -> list[int]:
    numbers: list[int] = drawn(rows, total=rows, seed=settings.seed).tolist()
    return numbers
