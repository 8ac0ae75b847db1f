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

from workflow.lib.documents import Documents
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
CACHED_DOCUMENTS = 4096
FEW_SHARDS = 128  # whose keys take less time than processes to start

Places = npt.NDArray[np.int64]


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

    def of_document(self, documents: Documents, number: int) -> Hashes:
        """Return the shingles of one document, each once."""
        ids = np.asarray(documents[number][0])
        return np.unique(self.shingles(ids, np.array([len(ids)]))[0])


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
        preload=[__name__],
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


def _keys(split: Split, band: int) -> npt.NDArray[np.uint32]:
    """Return one band's key of each document of `split.first_of_row`."""
    parts = [np.empty(0, dtype=np.uint32)]
    for number, chosen in split.documents.by_shard(split.first_of_row):
        keys = mapped(f"{split.documents.shards[number].stem}.keys.npy")
        parts.append(keys[band][chosen - split.documents.shard_offsets[number]])
    return np.concatenate(parts)


def _bands(measure: Measure) -> range:
    return range(BINS // band_rows(measure.threshold))


def _within(split: Split, measure: Measure) -> dict[int, float]:
    """Return the places of documents that resemble an earlier one, with the resemblance."""
    compare = _comparer(split, split, measure)
    found: dict[int, float] = {}
    for band in _bands(measure):
        keys = _keys(split, band)
        order = np.argsort(keys, kind="stable")
        ranked = keys[order]
        repeats = np.flatnonzero((ranked[1:] == ranked[:-1]) & (ranked[1:] > 0)) + 1
        firsts = np.searchsorted(ranked, ranked[repeats])
        for partners in (order[repeats - 1], order[firsts]):
            _compare_all(order[repeats], partners, compare, found)
    return found


def _between(heldout: Split, train: Split, measure: Measure) -> list[tuple[int, int, float]]:
    """Return each held-out document that resembles a training one, with that one and the resemblance."""
    compare = _comparer(heldout, train, measure)
    found: dict[int, float] = {}
    partner_of: dict[int, int] = {}
    for band in _bands(measure):
        keys, others = _keys(heldout, band), _keys(train, band)
        order = np.argsort(others, kind="stable")
        ranked = others[order]
        for side in ("left", "right"):
            last = int(side == "right")
            at = np.clip(
                np.searchsorted(ranked, keys, side=side) - last, 0, max(0, len(ranked) - 1)
            )
            hits = np.flatnonzero((ranked[at] == keys) & (keys > 0)) if len(ranked) else at[:0]
            partners = order[at[hits]]
            _compare_all(hits, partners, compare, found, partner_of)
    chosen, of_train = heldout.first_of_row, train.first_of_row
    return [
        (int(chosen[place]), int(of_train[partner_of[place]]), found[place])
        for place in sorted(found)
    ]


def _compare_all(
    places: Places,
    partners: Places,
    compare: Callable[[int, int], float | None],
    found: dict[int, float],
    partner_of: dict[int, int] | None = None,
) -> None:
    """Add to `found` the places that are near-duplicates of their partner; those in it are not compared again."""
    for place, partner in zip(places.tolist(), partners.tolist(), strict=True):
        if place not in found and (measured := compare(place, partner)) is not None:
            found[place] = measured
            if partner_of is not None:
                partner_of[place] = partner


def _comparer(first: Split, second: Split, measure: Measure) -> Callable[[int, int], float | None]:
    """Return what tells the resemblance of two documents, None if it is below the threshold or they are equal."""
    left, right = _reader(first, measure), _reader(second, measure)

    def digest(split: Split, place: int) -> int:
        return int(split.documents.digests[split.first_of_row[place]])

    def compare(place: int, partner: int) -> float | None:
        if digest(first, place) == digest(second, partner):
            return None
        measured = resemblance(left(place), right(partner))
        return measured if measured >= measure.threshold else None

    return compare


def _reader(split: Split, measure: Measure) -> Callable[[int], Hashes]:
    @lru_cache(CACHED_DOCUMENTS)
    def read(place: int) -> Hashes:
        return measure.of_document(split.documents, int(split.first_of_row[place]))

    return read
