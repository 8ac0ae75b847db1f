"""An index of the trained text of held-out documents, for search by training documents.

An answer is indexed by its shingles of the smallest hashes: all if there are at most `ANSWER_KEYS`,
an eighth of very many. A question is indexed by the shingles at both ends of its context, which a
passage cannot hide, and by the smallest of the others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.repetition.exchanges import (
    Exchanges,
    Hashes,
    Integers,
    Pieces,
    by_stretch,
)
from workflow.lib.data.tokens.splits import Split

ANSWER_KEYS = 64
SAMPLED_SHARE = 8
CONTEXT_KEYS = 48
END_KEYS = 8  # of them at either end
FILTER_BITS = 25
CONTEXT = np.uint64(0x9E3779B97F4A7C15)  # distinguishes a context's shingles from an answer's


@dataclass(frozen=True)
class _Sample:
    """Some held-out exchanges. Of each: `documents` its document in the corpus, `tokens` the
    trained ones, `shingles` of its answer. `answers` are hashes of answers, of the exchanges
    `answer_owners`; `questions` those of contexts bound to their answers, of `question_owners`;
    `contexts` the same ones without answer."""

    documents: Integers
    tokens: Integers
    shingles: Integers
    answers: npt.NDArray[Any]
    answer_owners: Integers
    questions: npt.NDArray[Any]
    question_owners: Integers
    contexts: npt.NDArray[Any]


@dataclass(frozen=True)
class Index(_Sample):
    """Keys of some held-out exchanges, in place of their hashes. A key is a number in the ascending
    `keys`; `rows` counts the held-out rows with it."""

    keys: Hashes
    rows: Integers
    filter: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.documents)

    def find(self, part: Exchanges) -> tuple[Integers, Integers]:
        """Return the keys of the exchanges' documents, and each key's document."""
        answers, contexts = part.documents[part.answer_owners], part.documents[part.context_owners]
        results = [
            self._find(part.answers, answers),
            self._find(part.questions, contexts),
            self._find(part.contexts ^ CONTEXT, contexts),
        ]
        keys, documents = zip(*results, strict=True)
        return np.concatenate(keys), np.concatenate(documents)

    def _find(self, hashes: Hashes, documents: Integers) -> tuple[Integers, Integers]:
        likely = np.flatnonzero(self.filter[_prefixes(hashes)])
        keys = np.searchsorted(self.keys, hashes[likely])
        keys = np.minimum(keys, len(self.keys) - 1)
        is_known = self.keys[keys] == hashes[likely]
        return keys[is_known], documents[likely[is_known]]


def indices(heldout: Split, *, pieces: Pieces, keys_at_once: int) -> Iterator[Index]:
    """Yield indices of about `keys_at_once` keys, which together hold all held-out documents."""
    samples: list[_Sample] = []
    for sample in _samples(heldout, pieces):
        samples.append(sample)
        if sum(len(s.answers) + 2 * len(s.questions) for s in samples) >= keys_at_once:
            yield _index(_joined(samples), heldout)
            samples = []
    if any(len(sample.documents) for sample in samples):
        yield _index(_joined(samples), heldout)


def _samples(heldout: Split, pieces: Pieces) -> Iterator[_Sample]:
    for _, numbers in heldout.documents.by_shard(heldout.chosen):
        for stretch, part in by_stretch(*heldout.documents.gather(numbers), pieces=pieces):
            yield _sample(part, numbers[stretch].astype(np.int64))


def _sample(part: Exchanges, numbers: Integers) -> _Sample:
    most = np.maximum(ANSWER_KEYS, np.bincount(part.answer_owners) // SAMPLED_SHARE)
    answers = _smallest(part.answers, part.answer_owners, most=most)
    lengths = np.bincount(part.context_owners)
    ends = np.cumsum(lengths)[part.context_owners] - np.arange(len(part.contexts))
    is_end = (ends <= END_KEYS) | (ends > lengths[part.context_owners] - END_KEYS)
    ranks = np.where(is_end, np.uint64(0), part.contexts)
    most = np.full(len(lengths), CONTEXT_KEYS)
    contexts = _smallest(part.contexts, part.context_owners, most=most, ranks=ranks)
    return _Sample(
        documents=numbers[part.documents],
        tokens=part.tokens,
        shingles=np.bincount(part.answer_owners, minlength=len(part.tokens)),
        answers=part.answers[answers],
        answer_owners=part.answer_owners[answers],
        questions=part.questions[contexts],
        question_owners=part.context_owners[contexts],
        contexts=part.contexts[contexts] ^ CONTEXT,
    )


def _smallest(
    hashes: Hashes, owners: Integers, *, most: Integers, ranks: Hashes | None = None
) -> Integers:
    """Return the places of each owner's first hashes by `ranks` (by default the hashes themselves),
    without duplicates, at most `most` of an owner."""
    order, firsts = grouped(owners, hashes)
    order = order[firsts]
    if ranks is not None:
        order = order[np.lexsort((ranks[order], owners[order]))]
    counts = np.bincount(owners[order])
    ranks_in_owner = np.arange(len(order)) - (np.cumsum(counts) - counts)[owners[order]]
    chosen: Integers = order[ranks_in_owner < most[owners[order]]]
    return chosen


def _joined(samples: list[_Sample]) -> _Sample:
    firsts = np.cumsum([0, *(len(sample.documents) for sample in samples)])
    shifted = [
        replace(
            sample,
            answer_owners=sample.answer_owners + first,
            question_owners=sample.question_owners + first,
        )
        for sample, first in zip(samples, firsts, strict=False)
    ]
    parts = zip(*(vars(sample).values() for sample in shifted), strict=True)
    return _Sample(*map(np.concatenate, parts))


def _index(sample: _Sample, heldout: Split) -> Index:
    kinds = [sample.answers, sample.questions, sample.contexts]
    keys, numbers = np.unique(np.concatenate(kinds), return_inverse=True)
    owners = [sample.answer_owners, sample.question_owners, sample.question_owners]
    ordinals = heldout.documents.ordinals[sample.documents[np.concatenate(owners)]]
    is_likely = np.zeros(2**FILTER_BITS, dtype=np.bool_)
    is_likely[_prefixes(keys)] = True
    numbered = np.split(numbers, np.cumsum([len(kind) for kind in kinds[:2]]))
    return Index(
        **{
            **vars(sample),
            **dict(zip(("answers", "questions", "contexts"), numbered, strict=True)),
        },
        keys=keys,
        rows=rows_by_key(numbers, ordinals, keys=len(keys)),
        filter=is_likely,
    )


def _prefixes(hashes: Hashes) -> Hashes:
    return hashes >> np.uint64(64 - FILTER_BITS)


def rows_by_key(numbers: Integers, ordinals: npt.NDArray[np.uint64], *, keys: int) -> Integers:
    """Return the number of different rows with each of `keys` keys."""
    order, firsts = grouped(numbers, ordinals)
    return np.bincount(numbers[order[firsts]], minlength=keys)


def grouped(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> tuple[Integers, Integers]:
    """Return the order by two arrays, and in it the start of each pair of values."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return order, np.flatnonzero(new)
