"""Shingles of documents: what is compared to tell whether one repeats another.

A document's *words* are runs of letters in lower case, and of what else is no space and no
punctuation, special tokens left out. They are put together from tokens, since a word in capitals is
cut otherwise. Its *shingles* are all runs of `SHINGLE_WORDS` words (Broder, "On the resemblance and
containment of documents", 1997)."""

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

SHINGLE_WORDS = 6
NOT_WORD = re.compile(r"[\W_]+")
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
