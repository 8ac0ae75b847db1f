"""Near-duplicates: rows that resemble an earlier one of their split, and held-out rows of train.

The latter are found by containment (`containment`). The former are only counted: two documents
resemble each other if of the features (`exchanges`) that either has both have a share of at least a
threshold. Keys of bands propose pairs, and every pair is then measured on the tokens themselves:
of the true pairs at the threshold 2% are missed, and fewer of those above it. Features that more
than a tenth of the documents have do not count: what all say makes none a copy of another."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from workflow.lib.data.tokens.documents import Documents
from workflow.lib.data.tokens.encoded_shards import Shard
from workflow.lib.data.tokens.process_pool import map_in_order
from workflow.lib.data.tokens.repetition.containment import Match, find_contained
from workflow.lib.data.tokens.repetition.exchanges import (
    TOKENS_AT_ONCE,
    Exchanges,
    by_stretch,
    exchanges,
    stretches,
)
from workflow.lib.data.tokens.repetition.shingles import (
    BINS,
    KEY_BITS,
    Hashes,
    Pieces,
    band_keys,
    band_rows,
    resemblance,
    widespread,
)
from workflow.lib.data.tokens.splits import BLOCK, Split

WIDESPREAD_SHARE = 0.1
SAMPLED_DOCUMENTS = 4096  # that show which shingles are widespread: so many,
SAMPLED_TOKENS = 2**20  # or as many as hold so many tokens, but no fewer than
LEAST_SAMPLED = 32
KEYS_AT_ONCE = 2**21  # keys that are sorted in memory
FEW_SHARDS = 16  # whose keys are made before other processes would begin

Positions = npt.NDArray[np.int64]
_NO_PAIRS = np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class Measure:
    """What two documents of a split are compared by. ignored: features that do not count."""

    pieces: Pieces
    ignored: Hashes
    threshold: float

    def features(self, of: Exchanges) -> tuple[Hashes, Positions]:
        """Return the features that count, and the number of each one's document."""
        hashes, owners = of.features()
        counted = ~np.isin(hashes, self.ignored)
        return hashes[counted], owners[counted]


@dataclass(frozen=True)
class NearDuplicates:
    """Near-duplicates of two splits. train, heldout: how many rows resemble an earlier one of their
    split; those that equal one are not among them. matches: held-out documents that are trained,
    nearly. shared_groups: held-out rows of a group that training rows are of."""

    train: int
    heldout: int
    matches: list[Match]
    shared_groups: int = 0


def make_measure(train: Split, *, pieces: Pieces, threshold: float) -> Measure:
    """Return the measure for a data set; a sample of train shows what is widespread."""
    mean = max(1, sum(shard.tokens for shard in train.documents.shards) // len(train.documents))
    count = max(LEAST_SAMPLED, min(SAMPLED_DOCUMENTS, SAMPLED_TOKENS // mean))
    positions = np.unique(np.linspace(0, len(train) - 1, count).astype(np.int64))
    texts = train.documents.gather(train.chosen[positions])
    hashes, owners = exchanges(*texts, pieces=pieces).features()
    ignored = widespread(hashes, owners, share=WIDESPREAD_SHARE)
    return Measure(pieces, ignored, threshold)


def _keys_path(documents: Documents) -> Path:
    """Return the file of keys, an array of shape (bands, documents), which is mapped."""
    return Path(f"{documents.stem}.keys.npy")


@dataclass(frozen=True)
class _KeyTask:
    """A shard whose keys are to be written, and the number of its first document."""

    shard: Shard
    first: int
    keys: Path


def write_keys(splits: list[Split], measure: Measure, *, processes: int) -> None:
    """Write the keys of every document, of two splits of one corpus once."""
    corpora = [c for c in {s.documents.stem: s.documents for s in splits}.values() if len(c)]
    for documents in corpora:
        shape = (BINS // band_rows(measure.threshold), len(documents))
        open_memmap(_keys_path(documents), mode="w+", dtype=np.uint64, shape=shape)
        with _keys_path(documents).open("r+b") as file:  # a full disk would end the writers
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    done = map_in_order(
        (
            _KeyTask(shard, first, _keys_path(documents))
            for documents in corpora
            for shard, first in zip(
                documents.shards, documents.shard_offsets.tolist(), strict=False
            )
        ),
        prepare=partial(_key_writer, measure),
        processes=processes,
        alone=FEW_SHARDS,
    )
    for _ in done:
        pass


def _key_writer(measure: Measure) -> Callable[[_KeyTask], None]:
    def write(task: _KeyTask) -> None:
        lengths = task.shard.table()["length"].astype(np.int64)
        keys = open_memmap(task.keys, mode="r+")
        ids, mask = task.shard.ids(), task.shard.mask()
        for some, of in by_stretch(ids, mask, lengths, pieces=measure.pieces):
            hashes, owners = measure.features(of)
            count, rows = some.stop - some.start, band_rows(measure.threshold)
            written = slice(task.first + some.start, task.first + some.stop)
            keys[:, written] = band_keys(hashes, owners, documents=count, rows=rows)

    return write


def find_near_duplicates(
    train: Split,
    heldout: Split,
    measure: Measure,
    *,
    processes: int,
    keys_at_once: int = KEYS_AT_ONCE,
) -> NearDuplicates:
    """Compare the documents of both splits by written keys, `keys_at_once` in memory."""
    return NearDuplicates(
        train=_within(train, measure, keys_at_once),
        heldout=_within(heldout, measure, keys_at_once),
        matches=find_contained(
            heldout, train, pieces=measure.pieces, threshold=measure.threshold, processes=processes
        ),
    )


def _read_keys(
    split: Split, keys: npt.NDArray[np.uint64], *, part: int, parts: int
) -> tuple[Hashes, Positions]:
    """Return a band's keys in range number `part` of the `parts` that all possible ones are cut
    into, and where their documents stand in `first_of_row`."""
    lowest, beyond = part * 2**KEY_BITS // parts, (part + 1) * 2**KEY_BITS // parts
    found, positions = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)]
    for start in range(0, len(split.first_of_row), BLOCK):
        block = keys[split.first_of_row[start : start + BLOCK]]
        inside = np.flatnonzero((block >= lowest) & (block < beyond))
        found.append(block[inside])
        positions.append(inside + start)
    return np.concatenate(found), np.concatenate(positions)


def _within(split: Split, measure: Measure, keys_at_once: int) -> int:
    """Count the documents that resemble an earlier one."""
    if not len(split):
        return 0
    compared, parts = _Comparison(split, measure), math.ceil(len(split) / keys_at_once)
    stored = open_memmap(_keys_path(split.documents), mode="r")
    for band, part in product(stored, range(parts)):
        keys, positions = _read_keys(split, band, part=part, parts=parts)
        order = np.argsort(keys, kind="stable")
        ranked = keys[order]
        repeats = np.flatnonzero((ranked[1:] == ranked[:-1]) & (ranked[1:] > 0)) + 1
        firsts = np.searchsorted(ranked, ranked[repeats])
        for partners in (order[repeats - 1], order[firsts]):
            compared.add(positions[order[repeats]], positions[partners])
    compared.measure_pairs()
    return int(compared.resembling.sum())


class _Comparison:
    """Measures proposed pairs of documents of a split, many at once. resembling: whether each
    document is known to resemble an earlier one, shape (documents,)."""

    def __init__(self, split: Split, measure: Measure) -> None:
        self._documents, self._numbers = split.documents, split.first_of_row
        self._measure = measure
        self._proposed: list[npt.NDArray[np.int64]] = []
        self._tokens = 0
        self.resembling = np.zeros(len(self._numbers), dtype=np.bool_)

    def add(self, positions: Positions, partners: Positions) -> None:
        """Take pairs; those of equal documents are left out, and of ones that are found already.
        Few pairs wait for more, and for `measure_pairs` in the end."""
        digests = self._documents.digests
        new = ~self.resembling[positions] & (
            digests[self._numbers[positions]] != digests[self._numbers[partners]]
        )
        pairs = np.stack([positions[new], partners[new]], axis=1)
        self._proposed.append(pairs)
        self._tokens += int(self._pair_lengths(pairs).sum())
        if self._tokens >= TOKENS_AT_ONCE:
            self.measure_pairs()

    def measure_pairs(self) -> None:
        pairs = np.unique(np.concatenate([_NO_PAIRS, *self._proposed]), axis=0)
        self._proposed, self._tokens = [], 0
        for some in stretches(self._pair_lengths(pairs)):
            self._measure_some(pairs[some])

    def _pair_lengths(self, pairs: npt.NDArray[np.int64]) -> Positions:
        lengths: Positions = self._documents.lengths[self._numbers[pairs]].sum(
            axis=1, dtype=np.int64
        )
        return lengths

    def _measure_some(self, pairs: npt.NDArray[np.int64]) -> None:
        features = self._features(np.unique(pairs))
        for position, partner in pairs.tolist():
            measured = resemblance(features[position], features[partner])
            self.resembling[position] |= measured >= self._measure.threshold

    def _features(self, positions: Positions) -> dict[int, Hashes]:
        """Return the features of documents by position, each once, ascending."""
        numbers, pieces = self._numbers[positions], self._measure.pieces
        of = exchanges(*self._documents.gather(numbers), pieces=pieces)
        hashes, owners = self._measure.features(of)
        edges = np.searchsorted(owners, np.arange(len(positions) + 1))
        return {
            position: np.unique(hashes[edges[number] : edges[number + 1]])
            for number, position in enumerate(positions.tolist())
        }
