"""Exchanges of documents: each trained turn with the context before it, as sets of shingles.

Rows are compared by their trained text. Rows with nothing else in common share context (system
prompts, lists of tools, passages of retrieval), so it is kept apart: it only decides whether two
short answers answer the same question.

*Words* are runs of letters in lower case, and of characters that are neither space nor punctuation,
without special tokens. They are joined from tokens, as a word in capitals is cut otherwise.
*Shingles* are all runs of `SHINGLE_WORDS` words (Broder, "On the resemblance and containment of
documents", 1997)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from workflow.lib.system.limits import WatchedWork

EXCESS = (
    "model.source: the decoder of its tokenizer {excess} for its tokens. Take its tokenizer.json "
    "from its source again, or name another model."
)
MAX_SECONDS, MAX_BYTES = 300.0, 2**32  # 256,000 tokens take 2 s
SHINGLE_WORDS = 6
NOT_WORD = re.compile(r"[\W_]+")
FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]

_POWERS: Hashes = FACTOR ** np.arange(4096, dtype=np.uint64)


@dataclass(frozen=True)
class Pieces:
    """Each token id as part of a word, in arrays of shape (ids,). hashes: of its letters and
    digits; 0 for a token without any. letters: their number. before, after: whether a word may
    continue into it, or out of it."""

    hashes: Hashes
    letters: npt.NDArray[np.int64]
    before: npt.NDArray[np.bool_]
    after: npt.NDArray[np.bool_]

    def words(
        self, ids: npt.NDArray[np.uint32], owners: npt.NDArray[np.int64]
    ) -> tuple[Hashes, npt.NDArray[np.int64]]:
        """Return a hash of each word, and the place of its first token. No word continues into a
        token of another owner. The hash of a word depends on its letters alone, not on its
        tokens."""
        at = np.flatnonzero(self.hashes[ids])
        pieces = ids[at]
        begins = np.ones(len(at), dtype=np.bool_)
        begins[1:] = ~(
            self.after[pieces[:-1]]
            & self.before[pieces[1:]]
            & (at[1:] == at[:-1] + 1)
            & (owners[at[1:]] == owners[at[:-1]])
        )
        firsts = np.flatnonzero(begins)
        upto = np.cumsum(self.letters[pieces]) - self.letters[pieces]
        within = upto - np.repeat(upto[firsts], np.diff(np.append(firsts, len(at))))
        shifted = self.hashes[pieces] * _POWERS[within % len(_POWERS)]
        return mixed(np.add.reduceat(shifted, firsts)), at[firsts]


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return the part of a word that each token id stands for."""
    added = tokenizer.added_tokens_decoder
    special = {number for number, token in added.items() if token.special}
    # Some decoders drop a space at the beginning of a text.
    numbers, start = range(len(tokenizer)), tokenizer.encode("a", add_special_tokens=False)[-1:]
    lead = len(str(tokenizer.decode(start)))
    with WatchedWork(EXCESS, seconds=MAX_SECONDS, num_bytes=MAX_BYTES):
        texts = [text[lead:] for text in tokenizer.batch_decode([[*start, n] for n in numbers])]
    texts = ["" if number in special else text for number, text in enumerate(texts)]
    hashes, letters, before, after = zip(*map(_piece, texts, numbers), strict=True)
    return Pieces(
        np.array(hashes, dtype=np.uint64), np.array(letters), np.array(before), np.array(after)
    )


def _piece(text: str, number: int) -> tuple[int, int, bool, bool]:
    if "\ufffd" in text:  # a part of a character is no text; the same bytes are the same piece
        return int(mixed(np.array([number + 1], dtype=np.uint64))[0]), 1, False, False
    word = NOT_WORD.sub("", text).lower()
    code = sum(ord(letter) * int(power) for letter, power in zip(word, _POWERS, strict=False))
    # Capitals change how a word is cut into tokens; where there are none, a token is a word.
    return code % 2**64, len(word), _has_cases(text[:1]), _has_cases(text[-1:])


def _has_cases(letter: str) -> bool:
    return letter.lower() != letter.upper()


def shingles(
    ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64], *, pieces: Pieces
) -> tuple[Hashes, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the shingles of concatenated documents, each one's document and first token. A
    document of fewer than `SHINGLE_WORDS` words is one shingle, one without words has none."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    numbers, tokens = pieces.words(ids, owners)
    owners = owners[tokens]
    counts = np.bincount(owners, minlength=len(lengths))
    ends = np.cumsum(counts)
    left = ends[owners] - np.arange(len(numbers))  # words of the document from each one on
    hashes = numbers.copy()
    for shift in range(1, SHINGLE_WORDS):
        hashes *= FACTOR
        # Behind the last word of a short document there are no others.
        hashes[:-shift] += np.where(left[:-shift] > shift, numbers[shift:], np.uint64(0))
    whole = (left >= SHINGLE_WORDS) | (left == counts[owners])
    return mixed(hashes[whole]), owners[whole], tokens[whole]


def mixed(values: Hashes) -> Hashes:
    """Spread the bits of 64-bit values (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


SHORT_WORDS = 20  # many questions have a shorter answer
SHORT_SHINGLES = SHORT_WORDS - SHINGLE_WORDS + 1
TOKENS_AT_ONCE = 2**18  # shingles in memory at a time: about 150 bytes for each token
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
        """Hashes of contexts bound to their answers, (contexts,)."""
        return mixed(self.contexts ^ self.names[self.context_owners])


def exchanges(
    ids: npt.NDArray[np.uint32], mask: npt.NDArray[np.bool_], lengths: Integers, *, pieces: Pieces
) -> Exchanges:
    """Return the exchanges of concatenated documents (tokens,), mask (tokens,) and lengths
    (documents,). A turn of special tokens alone is no exchange."""
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
    """Yield the exchanges of some documents at a time, and the range of these documents."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for stretch in stretches(lengths):
        tokens = slice(int(offsets[stretch.start]), int(offsets[stretch.stop]))
        yield stretch, exchanges(ids[tokens], mask[tokens], lengths[stretch], pieces=pieces)


def stretches(tokens: Integers) -> list[slice]:
    """Cut a series, shape (any,), into stretches of about `TOKENS_AT_ONCE`, at most one more."""
    stretch_numbers = np.cumsum(tokens) // TOKENS_AT_ONCE
    edges = [0, *(np.flatnonzero(np.diff(stretch_numbers)) + 1).tolist(), len(tokens)]
    return [slice(start, stop) for start, stop in pairwise(edges) if stop > start]
