"""Shingles of documents, and signatures by which documents that share many of them are found.

A document's *pieces* are its tokens in lower case without what is no letter or digit, special
tokens left out; its *shingles* are all runs of `SHINGLE_PIECES` pieces. The measure is the
resemblance of Broder, "On the resemblance and containment of documents" (1997): shingles in common
over shingles in either. A signature keeps the smallest hash in each of `BINS` bins (one permutation
hashing, Li, Owen and Zhang 2012; empty bins borrow from the next, Shrivastava and Li 2014), and
bands of it are keys: two documents of resemblance s share a key with the chance 1 - (1 -
s^rows)^bands.
"""

import math
import re

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

SHINGLE_PIECES = 6  # about five words of a common language
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


def piece_table(tokenizer: PreTrainedTokenizerBase) -> npt.NDArray[np.uint32]:
    """Return the piece of each token id, shape (ids,).

    Equal pieces have equal numbers; 0 stands for what is none.
    """
    added = tokenizer.added_tokens_decoder
    special = {number for number, token in added.items() if token.special}
    numbers: dict[str, int] = {"": 0}
    table = np.zeros(len(tokenizer), dtype=np.uint32)
    texts = tokenizer.batch_decode([[number] for number in range(len(tokenizer))])
    for number, text in enumerate(texts):
        if number not in special:
            # A part of a character is no text by itself, but the same bytes are the same piece.
            piece = f"{number}" if "\ufffd" in text else NOT_WORD.sub("", text).lower()
            table[number] = numbers.setdefault(piece, len(numbers))
    return table


def shingles(
    ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64], *, table: npt.NDArray[np.uint32]
) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Return the shingles of documents behind each other, and each one's document number.

    A document of fewer than `SHINGLE_PIECES` pieces is one shingle, one without pieces has none.
    """
    pieces = table[ids]
    words = np.flatnonzero(pieces)
    owners = np.repeat(np.arange(len(lengths)), lengths)[words]
    numbers = mixed(pieces[words].astype(np.uint64))
    counts = np.bincount(owners, minlength=len(lengths))
    ends = np.cumsum(counts)
    left = ends[owners] - np.arange(len(words))  # pieces of the document from each one on
    hashes = numbers.copy()
    for shift in range(1, SHINGLE_PIECES):
        hashes *= FACTOR
        # Behind the last piece of a short document stands nothing.
        hashes[:-shift] += np.where(left[:-shift] > shift, numbers[shift:], np.uint64(0))
    whole = (left >= SHINGLE_PIECES) | (left == counts[owners])
    return mixed(hashes[whole]), owners[whole]


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
    """Return the keys of documents, `KEY_BITS` bits, shape (BINS // rows, documents).

    A document without shingles has 0.
    """
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
    """Return the share of the shingles of either that both have, 0 where there is none.

    Neither repeats one.
    """
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / max(1, len(first) + len(second) - shared)


def widespread(hashes: Hashes, owners: npt.NDArray[np.int64], *, share: float) -> Hashes:
    """Return the shingles, sorted, that more than `share` of the documents have.

    At least three documents have each.
    """
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order]
    other = hashes[1:] != hashes[:-1]
    first_in_document = np.ones(len(hashes), dtype=np.bool_)
    first_in_document[1:] = other | (owners[1:] != owners[:-1])
    distinct, counts = np.unique(hashes[first_in_document], return_counts=True)
    documents = len(np.unique(owners))
    return distinct[counts > max(math.floor(share * documents), 2)]
