"""Near-duplicates within the training and the held-out documents, and between them.

Two documents are near-duplicates if their resemblance (`shingles`) is at least a threshold. Keys of bands
propose pairs, and every pair is then measured on the tokens themselves: a reported pair is one; of the true ones
at the threshold 2% are missed, and fewer of those above it. Shingles that more than a tenth of the documents
have (system prompts, templates) do not count: what every document says makes none a copy of another.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from workflow.lib.documents import offsets_of
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
SAMPLED_DOCUMENTS = 4096  # that show which shingles are widespread: so many,
SAMPLED_TOKENS = 2**20  # or as many as hold so many tokens, but no fewer than
LEAST_SAMPLED = 32
TOKENS_AT_ONCE = 2**18  # whose shingles are in memory: about 80 bytes for each of them
KEYS_AT_ONCE = 2**20  # keys that are sorted in memory
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
    mean = max(1, sum(shard.tokens for shard in train.documents.shards) // len(train.documents))
    count = max(LEAST_SAMPLED, min(SAMPLED_DOCUMENTS, SAMPLED_TOKENS // mean))
    places = np.unique(np.linspace(0, len(train) - 1, count).astype(np.int64))
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
        offsets, ids = offsets_of(lengths), shard.ids()
        keys = np.zeros((BINS // rows, shard.documents), dtype=np.uint32)
        for some in stretches(lengths):
            tokens = ids[offsets[some.start] : offsets[some.stop]]
            hashes, owners = measure.shingles(tokens, lengths[some])
            count = some.stop - some.start
            keys[:, some] = band_keys(hashes, owners, documents=count, rows=rows)
        save_array(shard.stem, "keys", keys)

    return write


def stretches(tokens: npt.NDArray[np.int64]) -> list[slice]:
    """Cut a series into stretches of about `TOKENS_AT_ONCE`, shape (any,): one more entry than that at most."""
    places = np.cumsum(tokens) // TOKENS_AT_ONCE
    edges = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(tokens)]
    return [slice(start, stop) for start, stop in pairwise(edges) if stop > start]


def find_near_duplicates(
    train: Split, heldout: Split, measure: Measure, *, keys_at_once: int = KEYS_AT_ONCE
) -> NearDuplicates:
    """Compare the documents of both splits, whose keys are written; about `keys_at_once` are in memory."""
    return NearDuplicates(
        train=_within(train, measure, keys_at_once),
        heldout=_within(heldout, measure, keys_at_once),
        pairs=_between(heldout, train, measure, keys_at_once),
    )


def _open_keys() -> OpenKeys:
    """Return what maps the keys of a shard, and keeps the last ones mapped: all bands ask for the same."""
    return lru_cache(maxsize=OPEN_KEYS)(lambda shard: mapped(f"{shard.stem}.keys.npy"))


@dataclass(frozen=True)
class _Keys:
    """One band's keys of the documents of a split's `first_of_row`, and the place of each there; all of one range."""

    keys: npt.NDArray[np.uint32]
    places: Places


def _read_keys(split: Split, band: int, open_keys: OpenKeys, *, part: int, parts: int) -> _Keys:
    """Return the keys that lie in range number `part`, if all possible ones are cut into `parts`."""
    keys, places, before = [np.empty(0, dtype=np.uint32)], [np.empty(0, dtype=np.int64)], 0
    for number, chosen in split.documents.by_shard(split.first_of_row):
        found = open_keys(split.documents.shards[number])[band]
        found = found[chosen - split.documents.shard_offsets[number]]
        taken = np.flatnonzero(
            (found.astype(np.uint64) * np.uint64(parts)) >> np.uint64(32) == part
        )
        keys.append(found[taken])
        places.append(taken + before)
        before += len(chosen)
    return _Keys(np.concatenate(keys), np.concatenate(places))


def _ranges(split: Split, measure: Measure, keys_at_once: int) -> Iterator[tuple[int, int, int]]:
    """Yield (band, part, parts), so that the keys of a range are about `keys_at_once`."""
    parts = math.ceil(len(split) / keys_at_once)
    for band in range(BINS // band_rows(measure.threshold)):
        for part in range(parts):
            yield band, part, parts


def _within(split: Split, measure: Measure, keys_at_once: int) -> int:
    """Return how many documents resemble an earlier one."""
    compared, open_keys = _Comparison(split, split, measure), _open_keys()
    for band, part, parts in _ranges(split, measure, keys_at_once):
        read = _read_keys(split, band, open_keys, part=part, parts=parts)
        order = np.argsort(read.keys, kind="stable")
        ranked, places = read.keys[order], read.places
        repeats = np.flatnonzero((ranked[1:] == ranked[:-1]) & (ranked[1:] > 0)) + 1
        firsts = np.searchsorted(ranked, ranked[repeats])
        for partners in (order[repeats - 1], order[firsts]):
            compared.add(places[order[repeats]], places[partners])
    return int(compared.found.sum())


def _between(
    heldout: Split, train: Split, measure: Measure, keys_at_once: int
) -> list[tuple[int, int, float]]:
    """Return each held-out document that resembles a training one, with that one and the resemblance."""
    compared, open_keys = _Comparison(heldout, train, measure), _open_keys()
    found: list[tuple[int, int, float]] = []
    for band, part, parts in _ranges(train, measure, keys_at_once):
        mine, others = (
            _read_keys(split, band, open_keys, part=part, parts=parts) for split in (heldout, train)
        )
        order = np.argsort(others.keys, kind="stable")
        ranked = others.keys[order]
        if not len(ranked):
            continue
        first = np.searchsorted(ranked, mine.keys, side="left")
        last = np.searchsorted(ranked, mine.keys, side="right") - 1
        for at in (np.minimum(first, len(ranked) - 1), np.maximum(last, 0)):
            hits = np.flatnonzero((ranked[at] == mine.keys) & (mine.keys > 0))
            found += compared.add(mine.places[hits], others.places[order[at[hits]]])
    chosen, of_train = heldout.first_of_row, train.first_of_row
    return [
        (int(chosen[place]), int(of_train[partner]), measured)
        for place, partner, measured in sorted(found)
    ]


class _Comparison:
    """Measures proposed pairs of a document of one split and one of another.

    found: whether each document of the first is known to resemble one of the second, shape (documents,).
    """

    def __init__(self, first: Split, second: Split, measure: Measure) -> None:
        self._splits = (first, second)
        self._measure = measure
        self.found = np.zeros(len(first.first_of_row), dtype=np.bool_)

    def add(self, places: Places, partners: Places) -> list[tuple[int, int, float]]:
        """Measure pairs, except of documents that are equal or found already; return new near-duplicates once each."""
        new = ~self.found[places] & (self._digests(0, places) != self._digests(1, partners))
        pairs = np.unique(np.stack([places[new], partners[new]], axis=1), axis=0)
        tokens = self._lengths(0, pairs[:, 0]) + self._lengths(1, pairs[:, 1])
        return [pair for some in stretches(tokens) for pair in self._measured(pairs[some])]

    def _digests(self, side: int, places: Places) -> Hashes:
        split = self._splits[side]
        digests: Hashes = split.documents.digests[split.first_of_row[places]]
        return digests

    def _lengths(self, side: int, places: Places) -> Places:
        split = self._splits[side]
        return split.documents.lengths[split.first_of_row[places]].astype(np.int64)

    def _measured(self, pairs: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, float]]:
        """Yield the first near-duplicate of each document among these pairs, and note it in `found`."""
        left, right = (self._shingles(side, np.unique(pairs[:, side])) for side in (0, 1))
        for place, partner in pairs.tolist():
            measured = resemblance(left[place], right[partner])
            if measured >= self._measure.threshold and not self.found[place]:
                self.found[place] = True
                yield place, partner, measured

    def _shingles(self, side: int, places: Places) -> dict[int, Hashes]:
        """Return the shingles of documents by place, each once, ascending."""
        split = self._splits[side]
        texts = [np.asarray(split.documents[int(split.first_of_row[place])][0]) for place in places]
        lengths = np.array([len(text) for text in texts])
        hashes, owners = self._measure.shingles(np.concatenate(texts), lengths)
        edges = np.searchsorted(owners, np.arange(len(places) + 1))
        return {
            place: np.unique(hashes[edges[number] : edges[number + 1]])
            for number, place in enumerate(places.tolist())
        }
