"""The counts of a tokens folder that predictions depend on."""

import math
from dataclasses import dataclass, replace

from workflow.lib.kernels.attention.document_lengths import LengthGroup


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

    def with_answers(self, answers: int, *, answer_tokens: int) -> "TokenCounts":
        """Return the counts of this many answers of at most `answer_tokens` to prompts of these
        rows, each with its prompt."""
        untrained = self.packed_rows * self.seq_len - self.trained_tokens
        length = min(self.seq_len, untrained / max(1, self.documents) + answer_tokens)
        return replace(
            self,
            packed_rows=max(1, math.ceil(answers * length / self.seq_len)),
            trained_tokens=answers * answer_tokens,
            documents=answers,
            lengths=(),
        )

    @property
    def documents_per_row(self) -> float:
        """Average documents of a packed row; 1 if unknown."""
        return max(1.0, round(self.documents / self.packed_rows, 2))

    @property
    def trained_share(self) -> float:
        """Share of the training rows' tokens that reach the loss."""
        return min(1.0, self.trained_tokens / (self.packed_rows * self.seq_len))
