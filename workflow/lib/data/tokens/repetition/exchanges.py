"""Exchanges of documents: each trained turn with what stands before it, as sets of shingles.

Rows are compared by what is trained of them. Context (system prompts, lists of tools, passages of
retrieval) is shared by rows that have nothing else in common, so it is kept apart: it tells only
whether two short answers answer the same question."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.repetition.shingles import (
    SHINGLE_WORDS,
    Hashes,
    Pieces,
    mixed,
    shingles,
)

SHORT_WORDS = 20  # an answer of fewer is given to many questions
SHORT_SHINGLES = SHORT_WORDS - SHINGLE_WORDS + 1
TOKENS_AT_ONCE = 2**18  # whose shingles are in memory: about 150 bytes for each of them
NO_CONTEXT = np.uint64(0x5851F42D4C957F2D)  # the shingle of an exchange that begins with its answer

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of some documents, in order.

    Each has, in arrays of shape (exchanges,): `documents` the number of its document, `starts` the
    first trained token, counted over all documents, `tokens` how many are trained, `names` a hash
    of the whole answer, `short` whether the answer has fewer than `SHORT_WORDS` words.

    The shingles of the answers are `answers`, of the exchanges `answer_owners`, and begin with the
    tokens `answer_tokens`; those of the contexts are `contexts`, of the exchanges `context_owners`.
    Both are in the order of the text."""

    documents: Integers
    starts: Integers
    tokens: Integers
    names: Hashes
    short: npt.NDArray[np.bool_]
    answers: Hashes
    answer_owners: Integers
    answer_tokens: Integers
    contexts: Hashes
    context_owners: Integers

    @property
    def questions(self) -> Hashes:
        return mixed(self.contexts ^ self.names[self.context_owners])


def exchanges(
    ids: npt.NDArray[np.uint32], mask: npt.NDArray[np.bool_], lengths: Integers, *, pieces: Pieces
) -> Exchanges:
    """Return the exchanges of documents that lie behind each other; `pieces` as for `shingles`. A
    turn without any word (of special tokens alone) is none."""
    begins = np.zeros(len(ids) + 1, dtype=np.bool_)
    begins[np.cumsum(lengths)[:-1]] = begins[0] = True
    edges = begins[:-1].copy()
    edges[1:] |= mask[1:] != mask[:-1]
    starts = np.flatnonzero(edges)
    ends = np.append(starts[1:], len(ids))
    hashes, owners, tokens = shingles(ids, ends - starts, pieces=pieces)
    counts = np.bincount(owners, minlength=len(starts))
    answers = mask[starts] & (counts > 0)
    # The run of tokens before an answer is its context, unless it is another document's.
    before = np.zeros(len(starts), dtype=np.bool_)
    before[:-1] = answers[1:] & ~mask[starts[:-1]] & ~begins[starts[1:]]
    numbers = np.cumsum(answers) - 1
    is_answer, is_context = answers[owners], before[owners]
    context_owners = numbers[owners[is_context] + 1]
    bare = np.setdiff1d(np.arange(np.count_nonzero(answers)), context_owners)
    contexts = np.concatenate([hashes[is_context], np.full(len(bare), NO_CONTEXT)])
    context_owners = np.concatenate([context_owners, bare])
    order = np.argsort(context_owners, kind="stable")
    return Exchanges(
        documents=(np.cumsum(begins[starts]) - 1)[answers],
        starts=starts[answers],
        tokens=(ends - starts)[answers],
        names=mixed(_sums(hashes, counts)[answers]),
        short=counts[answers] < SHORT_SHINGLES,
        answers=hashes[is_answer],
        answer_owners=numbers[owners[is_answer]],
        answer_tokens=tokens[is_answer],
        contexts=contexts[order],
        context_owners=context_owners[order],
    )


def _sums(hashes: Hashes, counts: Integers) -> Hashes:
    """Return the sums of runs of hashes, modulo 2^64."""
    upto = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(hashes)])
    edges = np.concatenate([[0], np.cumsum(counts)])
    sums: Hashes = upto[edges[1:]] - upto[edges[:-1]]
    return sums


def by_stretch(
    ids: npt.NDArray[np.uint32], mask: npt.NDArray[np.bool_], lengths: Integers, *, pieces: Pieces
) -> Iterator[tuple[slice, Exchanges]]:
    """Yield the exchanges of some documents at a time, and which documents these are."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for some in stretches(lengths):
        tokens = slice(int(offsets[some.start]), int(offsets[some.stop]))
        yield some, exchanges(ids[tokens], mask[tokens], lengths[some], pieces=pieces)


def stretches(tokens: Integers) -> list[slice]:
    """Cut a series, shape (any,), into stretches of about `TOKENS_AT_ONCE`, at most one more."""
    stretch_numbers = np.cumsum(tokens) // TOKENS_AT_ONCE
    edges = [0, *(np.flatnonzero(np.diff(stretch_numbers)) + 1).tolist(), len(tokens)]
    return [slice(start, stop) for start, stop in pairwise(edges) if stop > start]
