"""Near-duplicate texts: Jaccard similarity of word 5-grams, and containment of a text.

The measure is the resemblance of Broder, "On the resemblance and containment of documents" (1997).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

SHINGLE_WORDS = 5
# Jaccard similarity, or contained fraction, at and above which texts count as copies.
THRESHOLD = 0.5
# A shorter text (a name) may stand anywhere without being a copy.
MIN_CONTAINED_WORDS = SHINGLE_WORDS

Shingle = tuple[str, ...]


def normalised(text: str) -> str:
    """Return the words of a text in lower case, one space between them."""
    return " ".join(re.findall(r"\w+", text.lower()))


def shingles(text: str) -> frozenset[Shingle]:
    """Return the set of word 5-grams; of a shorter text, all its words as one shingle."""
    words = normalised(text).split()
    if not words:
        return frozenset()
    last_start = max(1, len(words) - SHINGLE_WORDS + 1)
    return frozenset(tuple(words[i : i + SHINGLE_WORDS]) for i in range(last_start))


class ShingleIndex:
    """Texts by their shingles, so that a text is compared only to those that share one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.sizes: list[int] = []
        self.owners: defaultdict[Shingle, list[int]] = defaultdict(list)
        for number, text in enumerate(texts):
            text_shingles = shingles(text)
            self.sizes.append(len(text_shingles))
            for shingle in text_shingles:
                self.owners[shingle].append(number)

    def _shared(self, text_shingles: Iterable[Shingle]) -> Counter[int]:
        return Counter(
            number for shingle in text_shingles for number in self.owners.get(shingle, ())
        )

    def has_near_duplicate(self, text: str) -> bool:
        """Whether any indexed text has a Jaccard similarity to `text` of `THRESHOLD` or more."""
        text_shingles = shingles(text)
        return any(
            shared >= THRESHOLD * (len(text_shingles) + self.sizes[number] - shared)
            for number, shared in self._shared(text_shingles).items()
        )

    def contained_in(self, document: str) -> frozenset[Shingle]:
        """Return all shingles of the indexed texts that the document holds largely.

        It holds `THRESHOLD` or more of such a text's shingles.
        """
        document_shingles = shingles(document)
        contained = {
            number
            for number, shared in self._shared(document_shingles).items()
            if shared >= THRESHOLD * self.sizes[number]
        }
        return frozenset(
            s for s in document_shingles if not contained.isdisjoint(self.owners.get(s, ()))
        )


def pair_texts(pair: dict[str, str]) -> tuple[str, str]:
    """Return what is compared of a pair: the completion, and prompt with completion."""
    return pair["completion"], f"{pair['prompt']} {pair['completion']}"


def near_duplicates(
    pairs: Sequence[dict[str, str]], of_pairs: Sequence[dict[str, str]]
) -> list[dict[str, str]]:
    """Return those of `pairs` whose completion, or whole, nearly repeats one of `of_pairs`."""
    completions = ShingleIndex(pair_texts(pair)[0] for pair in of_pairs)
    wholes = ShingleIndex(pair_texts(pair)[1] for pair in of_pairs)
    return [
        pair
        for pair in pairs
        if completions.has_near_duplicate(pair_texts(pair)[0])
        or wholes.has_near_duplicate(pair_texts(pair)[1])
    ]
