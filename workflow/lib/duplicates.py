"""Near-duplicates within the training and the held-out documents, and between them.

Two documents are near-duplicates if their resemblance (`shingles`) is at least a threshold. Keys of bands
propose pairs, and every pair is then measured on the tokens themselves: a reported pair is one; of the true ones
at the threshold 2% are missed, and fewer of those above it. Shingles that more than a tenth of the documents
have (system prompts, templates) do not count: what every document says makes none a copy of another.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from workflow.lib.encoded_shards import Shard, mapped, save_array
from workflow.lib.shingles import (
    BINS,
    Hashes,
    band_keys,
    band_rows,
    resemblance,
    shingles,
    widespread,
)
from workflow.lib.splits import Split
from workflow.lib.workers import map_in_order

WIDESPREAD_SHARE = 0.1
SAMPLED_DOCUMENTS = 4096  # that show which shingles are widespread
PAIRS_AT_ONCE = 1024
FEW_SHARDS = 16  # whose keys are made before other processes would begin

OPEN_KEYS = 1024  # shards whose keys stay mapped from band to band; a process may have 65,530 maps

Places = npt.NDArray[np.int64]
OpenKeys = Callable[[Shard], npt.NDArray[np.uint32]]


@dataclass(frozen=True)
class Measure:
    """What two documents are compared by: pieces of the tokens, shingles that do not count, and the threshold."""

    table: npt.NDArray[np.uint32]
    ignored: Hashes
    threshold: float

    def shingles(
        self, ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]
    ) -> tuple[Hashes, Places]:
        """Return the shingles that count, and the number of each one's document."""
        hashes, owners = shingles(ids, lengths, table=self.table)
        counted = ~np.isin(hashes, self.ignored)
        return hashes[counted], owners[counted]


@dataclass(frozen=True)
class NearDuplicates:
    """How many documents resemble an earlier one of their split, and which held-out ones resemble a training one.

    Documents that equal another are not among them. pairs: (held-out document, training document, resemblance).
    """

    train: int
    heldout: int
    pairs: list[tuple[int, int, float]]


def make_measure(train: Split, *, table: npt.NDArray[np.uint32], threshold: float) -> Measure:
    """Return the measure for a data set, of which some training documents show what is widespread."""
    places = np.unique(np.linspace(0, len(train) - 1, SAMPLED_DOCUMENTS).astype(np.int64))
    sample = [np.asarray(train[int(place)][0]) for place in places]
    lengths = np.array([len(ids) for ids in sample])
    hashes, owners = shingles(np.concatenate(sample), lengths, table=table)
    ignored = widespread(hashes, owners, share=WIDESPREAD_SHARE)
    return Measure(table, ignored, threshold)


def write_keys(splits: list[Split], measure: Measure, *, processes: int) -> None:
    """Write the keys of every document beside its shard."""
    shards = {shard.stem: shard for split in splits for shard in split.documents.shards}
    done = map_in_order(
        shards.values(),
        prepare=partial(_key_writer, measure),
        processes=processes,
        alone=FEW_SHARDS,
    )
    for _ in done:
        pass


def _key_writer(measure: Measure) -> Callable[[Shard], None]:
    rows = band_rows(measure.threshold)

    def write(shard: Shard) -> None:
        lengths = shard.table()["length"].astype(np.int64)
        hashes, owners = measure.shingles(np.asarray(shard.ids()), lengths)
        keys = band_keys(hashes, owners, documents=shard.documents, rows=rows)
        save_array(shard.stem, "keys", keys)

    return write


def find_near_duplicates(train: Split, heldout: Split, measure: Measure) -> NearDuplicates:
    """Compare the documents of both splits, whose keys are written."""
    return NearDuplicates(
        train=len(_within(train, measure)),
        heldout=len(_within(heldout, measure)),
        pairs=_between(heldout, train, measure),
    )


def _open_keys() -> OpenKeys:
    """Return what maps the keys of a shard, and keeps the last ones mapped: all bands ask for the same."""
    return lru_cache(maxsize=OPEN_KEYS)(lambda shard: mapped(f"{shard.stem}.keys.npy"))


def _keys(split: Split, band: int, open_keys: OpenKeys) -> npt.NDArray[np.uint32]:
    """Return one band's key of each document of `split.first_of_row`."""
    parts = [np.empty(0, dtype=np.uint32)]
    for number, chosen in split.documents.by_shard(split.first_of_row):
        keys = open_keys(split.documents.shards[number])
        parts.append(keys[band][chosen - split.documents.shard_offsets[number]])
    return np.concatenate(parts)


def _bands(measure: Measure) -> range:
    return range(BINS // band_rows(measure.threshold))


def _within(split: Split, measure: Measure) -> list[int]:
    """Return the places of documents that resemble an earlier one."""
    compared, open_keys = _Comparison(split, split, measure), _open_keys()
    for band in _bands(measure):
        keys = _keys(split, band, open_keys)
        order = np.argsort(keys, kind="stable")
        ranked = keys[order]
        repeats = np.flatnonzero((ranked[1:] == ranked[:-1]) & (ranked[1:] > 0)) + 1
        firsts = np.searchsorted(ranked, ranked[repeats])
        for partners in (order[repeats - 1], order[firsts]):
            compared.add(order[repeats], partners)
    return list(compared.found)


def _between(heldout: Split, train: Split, measure: Measure) -> list[tuple[int, int, float]]:
    """Return each held-out document that resembles a training one, with that one and the resemblance."""
    compared, open_keys = _Comparison(heldout, train, measure), _open_keys()
    for band in _bands(measure):
        keys, others = _keys(heldout, band, open_keys), _keys(train, band, open_keys)
        order = np.argsort(others, kind="stable")
        ranked = others[order]
        first = np.searchsorted(ranked, keys, side="left")
        last = np.searchsorted(ranked, keys, side="right") - 1
        for at in (np.minimum(first, len(ranked) - 1), np.maximum(last, 0)):
            hits = np.flatnonzero((ranked[at] == keys) & (keys > 0))
            compared.add(hits, order[at[hits]])
    chosen, of_train = heldout.first_of_row, train.first_of_row
    return [
        (int(chosen[place]), int(of_train[partner]), measured)
        for place, (partner, measured) in sorted(compared.found.items())
    ]


class _Comparison:
    """Measures proposed pairs of a document of one split and one of another.

    found: place of a near-duplicate -> place of its partner, and their resemblance.
    """

    def __init__(self, first: Split, second: Split, measure: Measure) -> None:
        self._splits = (first, second)
        self._measure = measure
        self.found: dict[int, tuple[int, float]] = {}

    def add(self, places: Places, partners: Places) -> None:
        """Measure pairs, except of documents that are equal or found already, some at a time."""
        known = np.isin(places, np.fromiter(self.found, dtype=np.int64, count=len(self.found)))
        new = ~known & (self._digests(0, places) != self._digests(1, partners))
        pairs = np.unique(np.stack([places[new], partners[new]], axis=1), axis=0)
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            self._measure_all(pairs[start : start + PAIRS_AT_ONCE])

    def _digests(self, side: int, places: Places) -> Hashes:
        split = self._splits[side]
        digests: Hashes = split.documents.digests[split.first_of_row[places]]
        return digests

    def _measure_all(self, pairs: npt.NDArray[np.int64]) -> None:
        left, right = (self._shingles(side, np.unique(pairs[:, side])) for side in (0, 1))
        for place, partner in pairs.tolist():
            measured = resemblance(left[place], right[partner])
            if measured >= self._measure.threshold:
                self.found.setdefault(place, (partner, measured))

    def _shingles(self, side: int, places: Places) -> dict[int, frozenset[int]]:
        """Return the shingles of documents by place."""
        split = self._splits[side]
        texts = [np.asarray(split.documents[int(split.first_of_row[place])][0]) for place in places]
        lengths = np.array([len(text) for text in texts])
        hashes, owners = self._measure.shingles(np.concatenate(texts), lengths)
        edges = np.searchsorted(owners, np.arange(len(places) + 1))
        return {
            place: frozenset(hashes[edges[number] : edges[number + 1]].tolist())
            for number, place in enumerate(places.tolist())
        }
