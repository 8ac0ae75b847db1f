"""Near-duplicates within the training and the held-out documents, and between them.

Two documents are near-duplicates if their resemblance (`shingles`) is at least a threshold. Keys of
bands propose pairs, and every pair is then measured on the tokens themselves: a reported pair is
one; of the true ones at the threshold 2% are missed, and fewer of those above it. Shingles that
more than a tenth of the documents have (system prompts, templates) do not count: what every
document says makes none a copy of another.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.documents import Documents, offsets_of
from workflow.lib.data.tokens.encoded_shards import Shard
from workflow.lib.data.tokens.process_pool import map_in_order
from workflow.lib.data.tokens.shingle_keys import Keys, StoredKeys
from workflow.lib.data.tokens.shingles import (
    BINS,
    Hashes,
    band_keys,
    band_rows,
    resemblance,
    shingles,
    widespread,
)
from workflow.lib.data.tokens.splits import BLOCK, Split

WIDESPREAD_SHARE = 0.1
SAMPLED_DOCUMENTS = 4096  # that show which shingles are widespread: so many,
SAMPLED_TOKENS = 2**20  # or as many as hold so many tokens, but no fewer than
LEAST_SAMPLED = 32
TOKENS_AT_ONCE = 2**18  # whose shingles are in memory: about 80 bytes for each of them
KEYS_AT_ONCE = 2**21  # keys that are sorted in memory
FEW_SHARDS = 16  # whose keys are made before other processes would begin

Positions = npt.NDArray[np.int64]
_NO_PAIRS = np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class Measure:
    """What two documents are compared by.

    table: the piece of each token id. ignored: shingles that do not count.
    """

    table: npt.NDArray[np.uint32]
    ignored: Hashes
    threshold: float

    def shingles(
        self, ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]
    ) -> tuple[Hashes, Positions]:
        """Return the shingles that count, and the number of each one's document."""
        hashes, owners = shingles(ids, lengths, table=self.table)
        counted = ~np.isin(hashes, self.ignored)
        return hashes[counted], owners[counted]


@dataclass(frozen=True)
class NearDuplicates:
    """Documents that resemble an earlier one, and held-out ones that resemble a training one.

    train, heldout: how many resemble an earlier one of their split. Documents that equal another
    are not among them. pairs: (held-out document, training document, resemblance).
    """

    train: int
    heldout: int
    pairs: list[tuple[int, int, float]]


def make_measure(train: Split, *, table: npt.NDArray[np.uint32], threshold: float) -> Measure:
    """Return the measure for a data set; a sample of train shows what is widespread."""
    mean = max(1, sum(shard.tokens for shard in train.documents.shards) // len(train.documents))
    count = max(LEAST_SAMPLED, min(SAMPLED_DOCUMENTS, SAMPLED_TOKENS // mean))
    positions = np.unique(np.linspace(0, len(train) - 1, count).astype(np.int64))
    sample = [train.documents.ids(int(train.chosen[position])) for position in positions]
    lengths = np.array([len(ids) for ids in sample])
    hashes, owners = shingles(np.concatenate(sample), lengths, table=table)
    ignored = widespread(hashes, owners, share=WIDESPREAD_SHARE)
    return Measure(table, ignored, threshold)


def stored_keys(documents: Documents, measure: Measure) -> StoredKeys:
    """Return where the keys of a corpus' documents are kept."""
    path, bands = Path(f"{documents.stem}.keys"), BINS // band_rows(measure.threshold)
    return StoredKeys(path, documents=len(documents), bands=bands)


@dataclass(frozen=True)
class _KeyTask:
    """A shard whose keys are to be written, and the number of its first document."""

    shard: Shard
    first: int
    stored: StoredKeys


def write_keys(splits: list[Split], measure: Measure, *, processes: int) -> None:
    """Write the keys of every document, of two splits of one corpus once."""
    corpora = {split.documents.stem: split.documents for split in splits}.values()
    for documents in corpora:
        stored_keys(documents, measure).create()
    done = map_in_order(
        (task for documents in corpora for task in _key_tasks(documents, measure)),
        prepare=partial(_key_writer, measure),
        processes=processes,
        alone=FEW_SHARDS,
    )
    for _ in done:
        pass


def _key_tasks(documents: Documents, measure: Measure) -> Iterator[_KeyTask]:
    stored = stored_keys(documents, measure)
    for shard, first in zip(documents.shards, documents.shard_offsets.tolist(), strict=False):
        yield _KeyTask(shard, first, stored)


def _key_writer(measure: Measure) -> Callable[[_KeyTask], None]:
    rows = band_rows(measure.threshold)

    def write(task: _KeyTask) -> None:
        lengths = task.shard.table()["length"].astype(np.int64)
        offsets, ids = offsets_of(lengths), task.shard.ids()
        keys = np.zeros((task.stored.bands, len(lengths)), dtype=np.uint64)
        for some in stretches(lengths):
            tokens = ids[offsets[some.start] : offsets[some.stop]]
            hashes, owners = measure.shingles(tokens, lengths[some])
            count = some.stop - some.start
            keys[:, some] = band_keys(hashes, owners, documents=count, rows=rows)
        task.stored.write(task.first, keys)

    return write


def stretches(tokens: npt.NDArray[np.int64]) -> list[slice]:
    """Cut a series, shape (any,), into stretches of about `TOKENS_AT_ONCE`.

    A stretch exceeds that by one entry at most.
    """
    stretch_numbers = np.cumsum(tokens) // TOKENS_AT_ONCE
    edges = [0, *(np.flatnonzero(np.diff(stretch_numbers)) + 1).tolist(), len(tokens)]
    return [slice(start, stop) for start, stop in pairwise(edges) if stop > start]


def find_near_duplicates(
    train: Split, heldout: Split, measure: Measure, *, keys_at_once: int = KEYS_AT_ONCE
) -> NearDuplicates:
    """Compare the documents of both splits, whose keys are written.

    About `keys_at_once` keys are in memory.
    """
    return NearDuplicates(
        train=_within(train, measure, keys_at_once),
        heldout=_within(heldout, measure, keys_at_once),
        pairs=_between(heldout, train, measure, keys_at_once),
    )


@dataclass(frozen=True)
class _Keys:
    """One band's keys of a range, and where their documents stand in `first_of_row`."""

    keys: Keys
    positions: Positions


def _read_keys(split: Split, stored: StoredKeys, band: int, *, part: int, parts: int) -> _Keys:
    """Return the keys in range number `part` of the `parts` that all possible ones are cut into."""
    lowest, beyond = part * 2**32 // parts, (part + 1) * 2**32 // parts
    keys, positions = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
    edges = np.searchsorted(split.first_of_row, np.arange(0, stored.documents + BLOCK, BLOCK))
    for start, stop in pairwise(edges.tolist()):
        if start < stop:
            numbers = split.first_of_row[start:stop].astype(np.int64)
            range_keys, range_positions = stored.within(band, numbers, lowest=lowest, beyond=beyond)
            keys.append(range_keys)
            positions.append(range_positions + start)
    return _Keys(np.concatenate(keys), np.concatenate(positions))


def _ranges(split: Split, measure: Measure, keys_at_once: int) -> Iterator[tuple[int, int, int]]:
    """Yield (band, part, parts), so that the keys of a range are about `keys_at_once`."""
    parts = math.ceil(len(split) / keys_at_once)
    for band in range(BINS // band_rows(measure.threshold)):
        for part in range(parts):
            yield band, part, parts


def stable_order(keys: Keys) -> Positions:
    """Return what NumPy's stable argsort does.

    It takes an eighth of the time where few keys are equal (24,000 keys, AVX-512). Its unstable one
    is vectorized; then equal keys alone are put in order.
    """
    order = np.argsort(keys)
    ranked = keys[order]
    same = ranked[1:] == ranked[:-1]
    some = np.flatnonzero(np.append(same, False) | np.append(False, same))
    order[some] = order[some][np.lexsort((order[some], ranked[some]))]
    return order


def _within(split: Split, measure: Measure, keys_at_once: int) -> int:
    """Return how many documents resemble an earlier one."""
    compared, stored = _Comparison(split, split, measure), stored_keys(split.documents, measure)
    for band, part, parts in _ranges(split, measure, keys_at_once):
        read = _read_keys(split, stored, band, part=part, parts=parts)
        order = stable_order(read.keys)
        ranked, positions = read.keys[order], read.positions
        repeats = np.flatnonzero((ranked[1:] == ranked[:-1]) & (ranked[1:] > 0)) + 1
        firsts = np.searchsorted(ranked, ranked[repeats])
        for partners in (order[repeats - 1], order[firsts]):
            compared.add(positions[order[repeats]], positions[partners])
    compared.measured()
    return int(compared.resembling.sum())


def _between(
    heldout: Split, train: Split, measure: Measure, keys_at_once: int
) -> list[tuple[int, int, float]]:
    """Return each held-out document that resembles a training one, that one, and how much."""
    compared = _Comparison(heldout, train, measure)
    stored = [(split, stored_keys(split.documents, measure)) for split in (heldout, train)]
    pairs: list[tuple[int, int, float]] = []
    for band, part, parts in _ranges(train, measure, keys_at_once):
        mine, others = (
            _read_keys(split, keys, band, part=part, parts=parts) for split, keys in stored
        )
        order = stable_order(others.keys)
        ranked = others.keys[order]
        if not len(ranked):
            continue
        first = np.searchsorted(ranked, mine.keys, side="left")
        last = np.searchsorted(ranked, mine.keys, side="right") - 1
        for at in (np.minimum(first, len(ranked) - 1), np.maximum(last, 0)):
            hits = np.flatnonzero((ranked[at] == mine.keys) & (mine.keys > 0))
            pairs += compared.add(mine.positions[hits], others.positions[order[at[hits]]])
    pairs += compared.measured()
    chosen, of_train = heldout.first_of_row, train.first_of_row
    return [
        (int(chosen[position]), int(of_train[partner]), measured)
        for position, partner, measured in sorted(pairs)
    ]


class _Comparison:
    """Measures proposed pairs of a document of one split and one of another, many at once.

    resembling: whether each document of the first is known to resemble one of the second, shape
    (documents,).
    """

    def __init__(self, first: Split, second: Split, measure: Measure) -> None:
        self._splits = (first, second)
        self._measure = measure
        self._proposed: list[npt.NDArray[np.int64]] = []
        self._tokens = 0
        self.resembling = np.zeros(len(first.first_of_row), dtype=np.bool_)

    def add(self, positions: Positions, partners: Positions) -> list[tuple[int, int, float]]:
        """Take pairs; return new near-duplicates once each.

        Pairs of documents that are equal, or found already, are left out. Few pairs wait for more,
        and for `measured` in the end.
        """
        new = ~self.resembling[positions] & (
            self._digests(0, positions) != self._digests(1, partners)
        )
        pairs = np.stack([positions[new], partners[new]], axis=1)
        self._proposed.append(pairs)
        self._tokens += int(self._pair_lengths(pairs).sum())
        return self.measured() if self._tokens >= TOKENS_AT_ONCE else []

    def measured(self) -> list[tuple[int, int, float]]:
        """Measure the pairs that wait; return new near-duplicates once each."""
        pairs = np.unique(np.concatenate([_NO_PAIRS, *self._proposed]), axis=0)
        self._proposed, self._tokens = [], 0
        tokens = self._pair_lengths(pairs)
        return [pair for some in stretches(tokens) for pair in self._of(pairs[some])]

    def _digests(self, side: int, positions: Positions) -> Hashes:
        split = self._splits[side]
        digests: Hashes = split.documents.digests[split.first_of_row[positions]]
        return digests

    def _lengths(self, side: int, positions: Positions) -> Positions:
        split = self._splits[side]
        return split.documents.lengths[split.first_of_row[positions]].astype(np.int64)

    def _pair_lengths(self, pairs: npt.NDArray[np.int64]) -> Positions:
        return self._lengths(0, pairs[:, 0]) + self._lengths(1, pairs[:, 1])

    def _of(self, pairs: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, float]]:
        """Yield the first near-duplicate of each document, and note it in `resembling`."""
        left, right = (self._shingles(side, np.unique(pairs[:, side])) for side in (0, 1))
        for position, partner in pairs.tolist():
            measured = resemblance(left[position], right[partner])
            if measured >= self._measure.threshold and not self.resembling[position]:
                self.resembling[position] = True
                yield position, partner, measured

    def _shingles(self, side: int, positions: Positions) -> dict[int, Hashes]:
        """Return the shingles of documents by position, each once, ascending."""
        split = self._splits[side]
        texts = [split.documents.ids(int(split.first_of_row[position])) for position in positions]
        lengths = np.array([len(text) for text in texts])
        hashes, owners = self._measure.shingles(np.concatenate(texts), lengths)
        edges = np.searchsorted(owners, np.arange(len(positions) + 1))
        return {
            position: np.unique(hashes[edges[number] : edges[number + 1]])
            for number, position in enumerate(positions.tolist())
        }
