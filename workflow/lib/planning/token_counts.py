"""The counts of a tokens folder that predictions depend on."""

import math
from dataclasses import dataclass, replace

import numpy as np

from workflow.lib.kernels.attention.answer_rows import AnswerRows, LengthGroup, RowCounter


@dataclass(frozen=True)
class TokenCounts:
    """Packed rows and tokens of a run's training data."""

    seq_len: int  # tokens of a packed row
    vocab_size: int  # of the tokenizer
    heldout_tokens: int
    packed_rows: int  # of the training split, at least 1
    trained_tokens: int  # tokens of the training split that reach the loss
    documents: int = 0  # of the training split; 0: unknown
    lengths: tuple[LengthGroup, ...] = ()
    """Of documents and padding in its rows; empty: unknown, and equal lengths are assumed."""
    answer_rows: AnswerRows | None = None  # of pairs and groups; None: unknown, or others

    def with_answers(
        self, answers: int, *, answer_tokens: int, per_prompt: int = 1
    ) -> "TokenCounts":
        """Return the counts of this many answers of at most `answer_tokens` to prompts of these
        rows, each with its prompt. per_prompt: several answers are a pair or a group."""
        untrained = self.packed_rows * self.seq_len - self.trained_tokens
        prompt = untrained / max(1, self.documents)
        length = min(self.seq_len, prompt + answer_tokens)
        rows = None
        if per_prompt > 1:
            rows = self._rows_of_answers(round(length), round(prompt), min(answers, per_prompt))
        return replace(
            self,
            packed_rows=max(1, math.ceil(answers * length / self.seq_len)),
            trained_tokens=answers * answer_tokens,
            documents=answers,
            lengths=(),
            answer_rows=rows,
        )

    def _rows_of_answers(self, length: int, prompt: int, per_prompt: int) -> AnswerRows:
        """Return rows of equal groups. Prompts and answers of others may fill the largest row."""
        prompt = max(1, min(prompt, length - 1))
        documents = max(1, self.seq_len // length)
        if documents > per_prompt:
            documents -= documents % per_prompt
        firsts = [prompt - 1 if number % per_prompt else 0 for number in range(documents)]
        positions = np.concatenate([np.arange(first, length) for first in firsts])
        counter = RowCounter(self.seq_len)
        counter.add(positions, trained=documents * (length - prompt))
        rows = counter.counted()
        most = float(self.seq_len)
        return replace(rows, largest=rows.largest._replace(tokens=most, trained=most))

    @property
    def documents_per_row(self) -> float:
        """Average documents of a packed row; 1 if unknown."""
        return max(1.0, round(self.documents / self.packed_rows, 2))

    @property
    def trained_share(self) -> float:
        """Share of a recording's trained tokens that reach the loss."""
        if self.answer_rows is not None:
            return 1.0  # no others are recorded
        return min(1.0, self.trained_tokens / (self.packed_rows * self.seq_len))
