"""Held-out documents whose trained text a training document trains too.

The measure is containment (Broder, "On the resemblance and containment of documents", 1997): a
short conversation within a longer one counts, whichever of them is held out. Held-out documents are
indexed, training documents are read once, and common keys are counted.

An answer is indexed by its shingles of the smallest hashes: all if there are at most `ANSWER_KEYS`,
an eighth of very many. A question is indexed by the shingles at both ends of its context, which a
passage cannot hide, and by the smallest of the others.

A shared answer counts by itself if few rows have it: at most `MOST_ROWS` and a tenth of all, or two
if it is short. Any other answer ("yes", a label, a refusal) counts only together with its question:
the context before it, without texts of `CONTEXT_ROWS` rows (system prompts, passages) unless it has
no other text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.encoded_shards import Shard
from workflow.lib.data.tokens.process_pool import map_in_order
from workflow.lib.data.tokens.repetition.exchanges import (
    SHINGLE_WORDS,
    SHORT_SHINGLES,
    SHORT_WORDS,
    Exchanges,
    Hashes,
    Integers,
    Pieces,
    by_stretch,
    exchanges,
)
from workflow.lib.data.tokens.splits import Split
from workflow.lib.data.tokens.token_store import Document
from workflow.lib.data.tokens.token_writer import spans

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
    limits = np.maximum(ANSWER_KEYS, np.bincount(part.answer_owners) // SAMPLED_SHARE)
    answers = _smallest(part.answers, part.answer_owners, limits=limits)
    lengths = np.bincount(part.context_owners)
    ends = np.cumsum(lengths)[part.context_owners] - np.arange(len(part.contexts))
    is_end = (ends <= END_KEYS) | (ends > lengths[part.context_owners] - END_KEYS)
    ranks = np.where(is_end, np.uint64(0), part.contexts)
    limits = np.full(len(lengths), CONTEXT_KEYS)
    contexts = _smallest(part.contexts, part.context_owners, limits=limits, ranks=ranks)
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
    hashes: Hashes, owners: Integers, *, limits: Integers, ranks: Hashes | None = None
) -> Integers:
    """Return the places of each owner's first hashes by `ranks` (by default the hashes themselves),
    without duplicates, at most `limits` of an owner."""
    order, firsts = grouped(owners, hashes)
    order = order[firsts]
    if ranks is not None:
        order = order[np.lexsort((ranks[order], owners[order]))]
    counts = np.bincount(owners[order])
    ranks_in_owner = np.arange(len(order)) - (np.cumsum(counts) - counts)[owners[order]]
    chosen: Integers = order[ranks_in_owner < limits[owners[order]]]
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


LEAST_SHINGLES = 8 - SHINGLE_WORDS + 1  # of an answer that can count by itself: eight words
MOST_ROWS = 32
COMMON_SHARE = 0.1
SHORT_ROWS = 2  # rows with a short answer: the held-out one and another
CONTEXT_ROWS = 3
SAME = 0.9  # of a short answer, or of the question before an answer
LEAST_SHARE = 0.1  # of a held-out document's trained tokens, even if the other one trains few
KEYS_AT_ONCE = 2**22  # held-out keys in memory: about 60 bytes for each of them
QUOTED_TOKENS = 24
FEW_SHARDS = 16  # searched in one process: others would not have begun


@dataclass(frozen=True)
class Match:
    """A held-out document, the training document that trains most of it, and the share of its
    trained tokens."""

    heldout: int
    train: int
    share: float


def find_contained(
    heldout: Split,
    train: Split,
    *,
    pieces: Pieces,
    threshold: float,
    processes: int,
    keys_at_once: int = KEYS_AT_ONCE,
) -> list[Match]:
    """Return a match for each held-out row of which a training document trains too much, in order.
    Measured is the share of its trained tokens, or of the training document's if it has fewer. The
    bound is the share at which two documents of one length have the resemblance `threshold`.
    Training documents are read once for each `keys_at_once` held-out keys."""
    least = 2 * threshold / (1 + threshold)
    matches: list[Match] = []
    for index in indices(heldout, pieces=pieces, keys_at_once=keys_at_once):
        shared = _Shared(index, train)
        results = map_in_order(
            _tasks(train),
            prepare=partial(_finder, index, pieces),
            processes=processes,
            alone=FEW_SHARDS,
        )
        for keys, documents in results:
            shared.add(keys, documents)
        matches += _matches(index, shared, heldout, train, least)
    by_row = {int(heldout.documents.ordinals[m.heldout]): m for m in reversed(matches)}
    return list(reversed(by_row.values()))


@dataclass(frozen=True)
class _Task:
    """A shard, the number of its first document, and its documents to search."""

    shard: Shard
    first: int
    chosen: Integers


def _tasks(train: Split) -> Iterator[_Task]:
    documents = train.documents
    for number, chosen in documents.by_shard(train.chosen):
        first = int(documents.shard_offsets[number])
        yield _Task(documents.shards[number], first, chosen.astype(np.int64) - first)


def _finder(index: Index, pieces: Pieces) -> Callable[[_Task], tuple[Integers, Integers]]:
    def find(task: _Task) -> tuple[Integers, Integers]:
        lengths = task.shard.table()["length"].astype(np.int64)
        is_chosen = np.zeros(len(lengths), dtype=np.bool_)
        is_chosen[task.chosen] = True
        keys, documents = [], []
        ids, mask = task.shard.ids(), task.shard.mask()
        for stretch, part in by_stretch(ids, mask, lengths, pieces=pieces):
            shared_keys, numbers = index.find(part)
            numbers += stretch.start
            keys.append(shared_keys[is_chosen[numbers]])
            documents.append(numbers[is_chosen[numbers]] + task.first)
        return np.concatenate(keys), np.concatenate(documents)

    return find


class _Shared:
    """The training documents of each key of an index, and the number of rows with it."""

    def __init__(self, index: Index, train: Split) -> None:
        self._train = train
        self._pairs: list[tuple[Integers, Integers]] = []
        self.rows = index.rows.copy()

    def add(self, keys: Integers, documents: Integers) -> None:
        """Count the keys of a shard's documents; a key of many rows is dropped."""
        few = self.rows[keys] <= MOST_ROWS
        order, firsts = grouped(keys[few], documents[few])
        chosen = np.flatnonzero(few)[order[firsts]]
        self._pairs.append((keys[chosen], documents[chosen]))
        ordinals = self._train.documents.ordinals[documents]
        self.rows += rows_by_key(keys, ordinals, keys=len(self.rows))

    def count_by_pair(
        self, keys: Integers, owners: Integers
    ) -> tuple[Integers, Integers, Integers]:
        all_keys = np.concatenate([keys for keys, _ in self._pairs])
        order = np.argsort(all_keys, kind="stable")
        all_keys = all_keys[order]
        documents = np.concatenate([documents for _, documents in self._pairs])[order]
        firsts = np.searchsorted(all_keys, keys, side="left")
        counts = np.searchsorted(all_keys, keys, side="right") - firsts
        owners, documents = np.repeat(owners, counts), documents[spans(firsts, counts)]
        order, firsts = grouped(owners, documents)
        counts = np.diff(np.append(firsts, len(order)))
        return owners[order[firsts]], documents[order[firsts]], counts


def _matches(
    index: Index, shared: _Shared, heldout: Split, train: Split, least: float
) -> Iterator[Match]:
    sharing, documents, shares = _shares(
        index, shared, all_rows=len(heldout.first_of_row) + len(train.first_of_row), least=least
    )
    # A training document may share several exchanges of a held-out one.
    order, firsts = grouped(index.documents[sharing], documents)
    covered = np.add.reduceat((shares * index.tokens[sharing])[order], firsts)
    queries, matched = index.documents[sharing][order[firsts]], documents[order[firsts]]
    numbers, owners = np.unique(index.documents, return_inverse=True)
    totals = np.bincount(owners, weights=index.tokens)
    share = covered / totals[np.searchsorted(numbers, queries)]
    too_much = np.maximum(share, covered / train.documents.trained[matched]) >= least
    chosen = np.flatnonzero(too_much & (share >= LEAST_SHARE))
    best = chosen[np.lexsort((matched[chosen], -share[chosen], queries[chosen]))]
    last = -1
    for number, match, best_share in zip(queries[best], matched[best], share[best], strict=True):
        if number != last:
            yield Match(int(number), int(match), float(best_share))
        last = number


def _shares(
    index: Index, shared: _Shared, *, all_rows: int, least: float
) -> tuple[Integers, Integers, npt.NDArray[np.float64]]:
    """Return exchanges, training documents, and the share of each exchange that the document
    trains. Short answers and questions count as a whole or not at all. A share of a long answer
    below `least` must be one passage."""
    keys, owners, by_question, edges = _counted(index, shared.rows, all_rows=all_rows)
    sharing, documents, counts = shared.count_by_pair(keys, owners)
    key_counts = np.bincount(owners, minlength=len(index))[sharing]
    shares = counts / key_counts
    is_whole = counts >= SAME * (key_counts - edges[sharing])
    is_passage = (shares >= least) | (shares * index.tokens[sharing] >= SHORT_WORDS)
    is_indivisible = by_question | (index.shingles < SHORT_SHINGLES)
    return sharing, documents, np.where(is_indivisible[sharing], is_whole, shares * is_passage)


def _counted(
    index: Index, rows: Integers, *, all_rows: int
) -> tuple[Integers, Integers, npt.NDArray[np.bool_], Integers]:
    """Return the keys that count, the exchange of each, and which exchanges count by question.
    rows: held-out and training rows that have each key, of `all_rows`. The last result are each
    question's keys that also hold words of the common context before it."""
    most = min(MOST_ROWS, max(SHORT_ROWS + 1, int(COMMON_SHARE * all_rows)))
    most_rows = np.where(index.shingles < SHORT_SHINGLES, SHORT_ROWS, most)
    few = rows[index.answers] <= most_rows[index.answer_owners]
    num_few = np.bincount(index.answer_owners[few], minlength=len(index))
    num_all = np.bincount(index.answer_owners, minlength=len(index))
    by_question = (index.shingles < LEAST_SHINGLES) | (2 * num_few < num_all)
    rare = rows[index.contexts] < CONTEXT_ROWS
    num_rare = np.bincount(index.question_owners[rare], minlength=len(index))
    num_contexts = np.bincount(index.question_owners, minlength=len(index))
    is_question_key = by_question[index.question_owners] & (
        rare | (num_rare == 0)[index.question_owners]
    )
    is_answer_key = few & ~by_question[index.answer_owners]
    return (
        np.concatenate([index.answers[is_answer_key], index.questions[is_question_key]]),
        np.concatenate(
            [index.answer_owners[is_answer_key], index.question_owners[is_question_key]]
        ),
        by_question,
        np.where(by_question & (num_rare > 0) & (num_rare < num_contexts), SHINGLE_WORDS - 1, 0),
    )


def shared_tokens(heldout: Document, train: Document, *, pieces: Pieces) -> slice:
    """Return the tokens of the held-out document to quote for a match: from the answer that shares
    most, or from before it if it is short."""
    own, other = (
        exchanges(*text, np.array([len(text[0])]), pieces=pieces) for text in (heldout, train)
    )
    shared = np.isin(own.answers, other.answers)
    assert shared.any(), "a match shares something"
    best = int(np.bincount(own.answer_owners[shared]).argmax())
    start = int(own.starts[best])
    if own.short[best]:
        return slice(max(0, start - QUOTED_TOKENS // 2), start + QUOTED_TOKENS // 2)
    start = int(own.answer_tokens[shared & (own.answer_owners == best)][0])
    return slice(start, start + QUOTED_TOKENS)
