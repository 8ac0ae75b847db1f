"""Shingles of documents, and signatures by which documents that share many of them are found.

A document's *words* are runs of letters in lower case, and of what else is no space and no
punctuation, special tokens left out. They are put together from tokens, since a word in capitals is
cut otherwise. Its *shingles* are all runs of `SHINGLE_WORDS` words. The measure is the resemblance
of Broder, "On the resemblance and containment of documents" (1997): shingles in common over
shingles in either. A signature keeps the smallest hash in each of `BINS` bins (one permutation
hashing, Li, Owen and Zhang 2012; empty bins borrow from the next, Shrivastava and Li 2014), and
bands of it are keys: two documents of resemblance s share a key with the chance 1 - (1 -
s^rows)^bands."""

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

SHINGLE_WORDS = 6
BINS = 96
BAND_ROWS = (12, 8, 6, 4, 3, 2, 1)  # divisors of BINS
RECALL = 0.98  # of pairs just at the threshold
# Bins from one to the next of a key. Neighbours of a short document borrow the same hash, which
# made 27,000 proposals of 24,000 rows of which 7 were true (1 apart), 5,200 (4) or 540 (32); of 444
# pairs of another set 444, 443 and 433 were found.
APART = 4
KEY_BITS = 40
NOT_WORD = re.compile(r"[\W_]+")
EMPTY = np.uint32(2**32 - 1)
BORROW = np.uint32(0x9E3779B1)
FACTOR = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]

_POWERS: Hashes = FACTOR ** np.arange(4096, dtype=np.uint64)


@dataclass(frozen=True)
class Pieces:
    """What each token id is of a word, in arrays of shape (ids,). hashes: of its letters and
    digits; 0 for a token without any. letters: how many. before, after: whether a word may go on
    with it, or behind it."""

    hashes: Hashes
    letters: npt.NDArray[np.int64]
    before: npt.NDArray[np.bool_]
    after: npt.NDArray[np.bool_]

    def words(
        self, ids: npt.NDArray[np.uint32], owners: npt.NDArray[np.int64]
    ) -> tuple[Hashes, npt.NDArray[np.int64]]:
        """Return a hash of each word, and where its first token is. No word goes on with a token of
        another owner. The hash of a word is that of its letters, however they are cut into
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
    added = tokenizer.added_tokens_decoder
    special = {number for number, token in added.items() if token.special}
    # Some decoders drop a space at the beginning of a text.
    numbers, start = range(len(tokenizer)), tokenizer.encode("a", add_special_tokens=False)[-1:]
    lead = len(str(tokenizer.decode(start)))
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
    """Return the shingles of documents behind each other, each one's document and first token. A
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
        # Behind the last word of a short document stands nothing.
        hashes[:-shift] += np.where(left[:-shift] > shift, numbers[shift:], np.uint64(0))
    whole = (left >= SHINGLE_WORDS) | (left == counts[owners])
    return mixed(hashes[whole]), owners[whole], tokens[whole]


def mixed(values: Hashes) -> Hashes:
    """Spread the bits of 64-bit values (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def band_rows(threshold: float) -> int:
    """Return how many bins make a key: the most that find `RECALL` of pairs at the threshold."""
    for rows in BAND_ROWS:
        if 1 - (1 - threshold**rows) ** (BINS // rows) >= RECALL:
            return rows
    return 1


def band_keys(
    hashes: Hashes, owners: npt.NDArray[np.int64], *, documents: int, rows: int
) -> npt.NDArray[np.uint64]:
    """Return documents' keys, `KEY_BITS` bits, (BINS // rows, documents); 0: no shingles."""
    bins = ((hashes >> np.uint64(32)) * np.uint64(BINS)) >> np.uint64(32)
    values = (hashes & np.uint64(EMPTY)).astype(np.uint32)
    signature = np.full(documents * BINS, EMPTY)
    np.minimum.at(signature, owners * BINS + bins.astype(np.int64), values)
    signature = _borrowed(signature.reshape(documents, BINS))
    spread = signature.reshape(documents, -1, rows, APART)
    keys = np.zeros((documents, BINS // rows), dtype=np.uint64)
    for row in range(rows):
        keys = mixed(keys * FACTOR + spread[:, :, row].reshape(keys.shape) + np.uint64(1))
    shortened = np.maximum(keys >> np.uint64(64 - KEY_BITS), np.uint64(1))
    shortened[np.bincount(owners, minlength=documents) == 0] = 0
    return np.ascontiguousarray(shortened.T)


def _borrowed(signature: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Fill each empty bin by the next full one, around the end, changed by the distance."""
    full = np.concatenate([signature, signature], axis=1) != EMPTY
    full_bins = np.where(full, np.arange(2 * BINS), 2 * BINS)
    after = np.minimum.accumulate(full_bins[:, ::-1], axis=1)[:, ::-1][:, :BINS]
    distance = (after - np.arange(BINS)).astype(np.uint32)
    lent: npt.NDArray[np.uint32] = np.take_along_axis(signature, after % BINS, axis=1)
    return lent + distance * BORROW


def resemblance(first: Hashes, second: Hashes) -> float:
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / max(1, len(first) + len(second) - shared)


def widespread(hashes: Hashes, owners: npt.NDArray[np.int64], *, share: float) -> Hashes:
    """Return the shingles, sorted, that more than `share` (at least 3) of documents have."""
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order]
    other = hashes[1:] != hashes[:-1]
    first_in_document = np.ones(len(hashes), dtype=np.bool_)
    first_in_document[1:] = other | (owners[1:] != owners[:-1])
    distinct, counts = np.unique(hashes[first_in_document], return_counts=True)
    documents = len(np.unique(owners))
    return distinct[counts > max(math.floor(share * documents), 2)]
