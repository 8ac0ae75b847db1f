"""Train and held-out pairs, split by object and free of near-duplicates of each other."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .near_duplicates import ShingleIndex, pair_texts
from .pairs import Pair, fraction

HELDOUT_SHARE = 0.06  # of objects, before near-duplicates of train leave


@dataclass(frozen=True)
class Split:
    """The two splits, and what left the held-out one as near-duplicates of train.

    moved_pairs, moved_sources: how many pairs and objects left.
    """

    train: list[Pair]
    heldout: list[Pair]
    moved_pairs: int
    moved_sources: int

    @property
    def heldout_sources(self) -> frozenset[str]:
        """The names of the held-out objects."""
        return frozenset(pair.source for pair in self.heldout)


def split_pairs(pairs: Sequence[Pair]) -> Split:
    """Hold out a share of the objects with all their pairs.

    An object of which any pair nearly repeats one of train moves to train with all its pairs. A
    move may make another held-out object a near-duplicate, so this repeats until none is left.
    """
    by_source: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_source[pair.source].append(pair)
    chosen = {s for s in by_source if fraction("heldout", s) < HELDOUT_SHARE}
    heldout = set(chosen)
    while moved := _near_duplicates_of_train(by_source, heldout):
        heldout -= moved
    moved_sources = chosen - heldout
    return Split(
        train=[pair for pair in pairs if pair.source not in heldout],
        heldout=[pair for pair in pairs if pair.source in heldout],
        moved_pairs=sum(len(by_source[source]) for source in moved_sources),
        moved_sources=len(moved_sources),
    )


def _near_duplicates_of_train(by_source: dict[str, list[Pair]], heldout: set[str]) -> set[str]:
    train = [
        pair
        for source, source_pairs in by_source.items()
        if source not in heldout
        for pair in source_pairs
    ]
    index = ShingleIndex(text for pair in train for text in revealed_texts(pair))
    return {
        source
        for source in heldout
        for pair in by_source[source]
        if any(index.has_near_duplicate(text) for text in revealed_texts(pair))
    }


def revealed_texts(pair: Pair) -> list[str]:
    """Return every text of a pair that the other split must not repeat."""
    texts = [*pair_texts(pair.as_row()), pair.description]
    return [text for text in texts if text]
