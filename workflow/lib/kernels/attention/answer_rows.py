"""Rows of answers to prompts: which tokens are left when the documents of an example share their
prompt, and the counts of such rows, by which preflight records them. Nothing here needs torch.

Lengths of packed documents are grouped by powers of two, for the work of attention: without a
window it grows with squared lengths; of documents longer than a window it grows with their tokens.
So the groups are exact without a window, and with a window of a power of two. Any other window
divides one group, whose mean length decides."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from workflow.lib.kernels.attention.attention_choice import FLEX_BLOCK


class LengthGroup(NamedTuple):
    """Documents with lengths below a power of two, and at least half of it."""

    below: int  # the power of two
    documents: float
    tokens: float
    squares: float  # sum of the squared lengths, see `grouped`


def document_starts(position_ids: Any) -> Any:
    """Return where documents start (rows, tokens) bool, of an array or a tensor of positions."""
    starts = position_ids == 0
    starts[:, 1:] |= position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def grouped(
    parts: Iterable[npt.NDArray[Any]], seen: Iterable[Any] | None = None
) -> tuple[LengthGroup, ...]:
    """Return the groups of all lengths, the shortest first. parts: some lengths, above 0, each.
    seen: tokens of other documents that each document sees before its own; s of them add 2 s n to
    the square of n."""
    sums = np.zeros((64, 3), dtype=np.int64)
    for lengths, before in zip(parts, seen or repeat(0), strict=False):
        own = lengths.astype(np.int64)
        for power, amounts in enumerate((own**0, own, own * (own + 2 * before))):
            np.add.at(sums[:, power], np.frexp(lengths)[1], amounts)
    return tuple(LengthGroup(1 << x, *row) for x, row in enumerate(sums.tolist()) if row[0])


def equal_lengths(length: float) -> tuple[LengthGroup, ...]:
    """Return the groups of documents that all have `length` tokens."""
    return (LengthGroup(1 << math.frexp(length)[1], 1, length, length * length),)


def are_equal(groups: Sequence[LengthGroup]) -> bool:
    """Whether all documents have one length: n * sum(l^2) = (sum l)^2."""
    _, documents, tokens, squares = map(sum, zip(*groups, strict=True))
    return math.isclose(documents * squares, tokens**2, rel_tol=1e-12)


def computed_keys(
    groups: Sequence[LengthGroup], window: int | None = None, chunk: int | None = None
) -> float:
    """Return the keys that kernels compute on average for a query: the seen ones, and half a block
    on each edge. window: most seen keys, itself included; chunk: tokens of a part of a document,
    which sees no other part."""
    pairs = 0.0
    for _, documents, tokens, squares in groups:
        if chunk and tokens > documents * chunk:
            documents, squares = tokens / chunk, tokens * chunk
        if window and 0 < window < tokens / documents:
            pairs += tokens * (window + FLEX_BLOCK) - documents * window * (window - 1) / 2
        else:
            pairs += (squares + tokens * FLEX_BLOCK) / 2
    return pairs / sum(group.tokens for group in groups)


SHARED_MULTIPLE = 64  # of tokens in rows that share prompts
# Lengths of these rows: each has its own CUDA graphs. Of 400 micro-batches of drawn pairs, 2 rows
# of 8,192 tokens, 52 are captured with 16 lengths, 250 with 128.
SHARED_LENGTHS = 16
BLOCK_TOKENS = 2**22  # of rows read at a time
MOST_ROWS = 64  # described of a run
DRAWN = 256  # micro-batches of several rows


class RowCounts(NamedTuple):
    """A row of documents; its padding is the last one."""

    tokens: float
    documents: float
    prompt_keys: float
    """Tokens of prompts, once for each document that sees another's."""
    trained: float


@dataclass(frozen=True)
class AnswerRows:
    """Rows whose examples share their prompts."""

    __pydantic_config__: ClassVar = {"strict": False}  # JSON has lists

    rows: tuple[RowCounts, ...]
    """All, or `MOST_ROWS` that stand for all. Their tokens are those of `padded_length`."""
    largest: RowCounts
    """The most of each count, among rows with the most tokens."""
    copies: int
    """Documents that see a prompt besides its own, at most."""
    documents: tuple[LengthGroup, ...]
    """Of all rows; squares as of `grouped`."""

    def micro_batches(self, *, processes: int, rows: int) -> npt.NDArray[np.float64]:
        """Return random micro-batches (micro-batches, processes, rows, counts of `RowCounts`)."""
        counts = np.array(self.rows, dtype=np.float64)
        if processes * rows == 1:
            return counts[:, None, None]
        draw = np.random.default_rng(0)
        return counts[draw.integers(len(counts), size=(DRAWN, processes, rows))]


def padded_length(longest: int, *, seq_len: int) -> int:
    """Return the tokens of rows that share prompts, of which the longest has `longest`."""
    unit = SHARED_MULTIPLE * max(1, seq_len // (SHARED_MULTIPLE * SHARED_LENGTHS))
    return min(-(-longest // unit) * unit, seq_len)


@dataclass
class RowCounter:
    """Counts rows one by one."""

    seq_len: int
    _rows: list[RowCounts] = field(default_factory=list)
    _documents: list[npt.NDArray[np.int64]] = field(default_factory=list)
    _copies: int = 0

    def add(self, positions: npt.NDArray[Any], *, trained: int) -> None:
        """Count a row of these positions, without padding."""
        tokens = padded_length(len(positions), seq_len=self.seq_len)
        padded = np.concatenate([positions, np.arange(tokens - len(positions))])
        starts = np.flatnonzero(document_starts(padded[None]))
        seen = padded[starts].astype(np.int64)
        turns = np.flatnonzero(np.append(seen == 0, True))
        self._copies = max(self._copies, int(np.diff(turns).max()) - 1)
        self._documents.append(np.stack([np.diff(starts, append=tokens), seen]))
        self._rows.append(RowCounts(tokens, len(starts), int(seen.sum()), trained))

    def counted(self) -> AnswerRows:
        rows = sorted(self._rows, key=lambda row: (row.tokens, row.trained))
        number = min(len(rows), MOST_ROWS)
        longest = [row for row in rows if row.tokens == rows[-1].tokens]
        return AnswerRows(
            rows=tuple(rows[(2 * n + 1) * len(rows) // (2 * number)] for n in range(number)),
            largest=RowCounts(*map(max, zip(*longest, strict=True))),
            copies=self._copies,
            documents=grouped(*zip(*self._documents, strict=True)),
        )


def answer_rows(
    input_ids: npt.NDArray[Any],
    position_ids: npt.NDArray[Any],
    loss_mask: npt.NDArray[np.bool_],
    *,
    paired: bool,
) -> AnswerRows:
    """Count rows (rows, seq_len), which may be files; paired: as of `kept_tokens`."""
    seq_len = position_ids.shape[1]
    counter, step = RowCounter(seq_len), max(1, BLOCK_TOKENS // seq_len)
    for first in range(0, len(position_ids), step):
        block = [np.asarray(x[first : first + step]) for x in (input_ids, position_ids, loss_mask)]
        kept = kept_tokens(*block, paired=paired)
        for positions, trained, left in zip(*block[1:], kept, strict=True):
            counter.add(positions[left], trained=int(trained.sum()))
    return counter.counted()


def kept_tokens(
    input_ids: npt.NDArray[Any],
    position_ids: npt.NDArray[Any],
    loss_mask: npt.NDArray[np.bool_],
    *,
    paired: bool,
) -> npt.NDArray[np.bool_]:
    """Return which tokens of rows (rows, seq_len) are kept when the documents of every example
    share their common tokens before a trained one. paired: an example is two documents; else all
    neighbours with the same prompt. Padding is not kept."""
    kept = np.ones(position_ids.shape, dtype=np.bool_)
    for ids, positions, trained, left in zip(input_ids, position_ids, loss_mask, kept, strict=True):
        edges = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
        documents = [slice(*edge) for edge in pairwise(edges)]
        if len(documents) % 2 if paired else not trained[documents[-1]].any():
            left[documents.pop()] = False
        first = slice(0)
        for number, document in enumerate(documents):
            pair = (first, document)
            length = _common(*(ids[x] for x in pair), *(trained[x] for x in pair))
            whole = number > 0 and all(length == trained[x].argmax() for x in pair)
            if number % 2 if paired else whole:
                left[document.start : document.start + max(0, length - 1)] = False
            else:
                first = document
    return kept


def _common(one: npt.NDArray[Any], other: npt.NDArray[Any], *trained: npt.NDArray[np.bool_]) -> int:
    """Return how many first tokens two documents have in common, before a trained one."""
    length = min(len(one), len(other))
    ends = [one[:length] != other[:length], *(mask[:length] for mask in trained)]
    return min((int(end.argmax()) for end in ends if end.any()), default=length)
