"""The documents of a corpus: a few numbers of each on disk, their tokens in the shards.

Memory does not grow with the tokens. Arrays that grow with the documents are mapped from files, so
the system may take their memory back at any time."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.encoded_shards import Shard
from workflow.lib.data.tokens.token_store import Document

COLUMNS = {
    "length": "<u4",
    "full_length": "<u4",
    "trained": "<u4",
    "ordinal": "<u8",
    "digest": "<u8",
    "group": "<u8",
}
OPEN_SHARDS = 128  # shards that stay mapped; each has up to two files


class _OpenShard:
    """A shard's mapped arrays, and the start of each document in them."""

    def __init__(self, shard: Shard, lengths: npt.NDArray[np.uint32]) -> None:
        self._shard, self._offsets = shard, offsets_of(lengths)
        self.ids = shard.ids()

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        return self._shard.mask()

    def span(self, position: int) -> slice:
        return slice(int(self._offsets[position]), int(self._offsets[position + 1]))


class Documents:
    """All documents of a corpus. Attributes, each of shape (documents,): `lengths` tokens as kept,
    `full_lengths` of the whole row, `trained` tokens, `ordinals` number of the row among all rows
    read, `digests` of the token ids, `groups` hash of the row's group (0: none)."""

    def __init__(self, shards: Sequence[Shard], *, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        self.shards = shards
        self.lengths: npt.NDArray[np.uint32] = columns["length"]
        self.full_lengths: npt.NDArray[np.uint32] = columns["full_length"]
        self.trained: npt.NDArray[np.uint32] = columns["trained"]
        self.ordinals: npt.NDArray[np.uint64] = columns["ordinal"]
        self.groups: npt.NDArray[np.uint64] = columns["group"]
        self.digests: npt.NDArray[np.uint64] = columns["digest"]
        self.shard_offsets = np.cumsum([0, *(shard.documents for shard in shards)])
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    def __len__(self) -> int:
        return int(self.shard_offsets[-1])

    def __getitem__(self, index: int) -> Document:
        """Return document `index`: (token ids uint32, loss mask bool), shape (length,), mapped."""
        number, position = self.locate(index)
        shard = self._opened(number)
        span = shard.span(position)
        return shard.ids[span], shard.mask[span]

    def gather(
        self, numbers: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return token ids, mask and lengths of some documents (at least one), end to end."""
        texts = [self[number] for number in numbers.tolist()]
        ids, masks = zip(*texts, strict=True)
        lengths = np.array([len(document) for document in ids], dtype=np.int64)
        return np.concatenate(ids), np.concatenate(masks), lengths

    def ids(self, index: int) -> npt.NDArray[np.uint32]:
        """Return the token ids of document `index`, (length,), mapped; masks stay closed."""
        number, position = self.locate(index)
        shard = self._opened(number)
        return shard.ids[shard.span(position)]

    def origin(self, index: int) -> tuple[int, int]:
        """Return the number of a document's file, and of its row in that file."""
        shard, position = self.locate(index)
        return self.shards[shard].file, int(self.shards[shard].table()["row"][position])

    def by_shard(
        self, chosen: npt.NDArray[np.uint32]
    ) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Yield the ascending `chosen` documents shard by shard: number of the shard, and its
        documents."""
        edges = np.searchsorted(chosen, self.shard_offsets)
        for shard in np.flatnonzero(np.diff(edges)).tolist():
            yield shard, chosen[edges[shard] : edges[shard + 1]]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the shard of a document, and its position there."""
        shard = int(np.searchsorted(self.shard_offsets, index, side="right")) - 1
        return shard, index - int(self.shard_offsets[shard])

    def _opened(self, number: int) -> _OpenShard:
        if number not in self._open:
            first, last = self.shard_offsets[number : number + 2]
            self._open[number] = _OpenShard(self.shards[number], self.lengths[first:last])
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]


def offsets_of(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the start of each document, and the end of the last."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def collect_documents(shards: Sequence[Shard], *, folder: Path, name: str) -> Documents:
    """Gather the shards' tables into arrays on disk, `<folder>/<name>.<column>.npy`."""
    count = sum(shard.documents for shard in shards)
    assert count < 2**32, "documents are numbered in 4 bytes"
    if not count:
        empty_columns = {column: np.empty(0, dtype=kind) for column, kind in COLUMNS.items()}
        return Documents(shards, columns=empty_columns)
    columns = {
        column: np.lib.format.open_memmap(
            folder / f"{name}.{column}.npy", mode="w+", dtype=np.dtype(kind), shape=(count,)
        )
        for column, kind in COLUMNS.items()
    }
    first = 0
    for shard in shards:
        table = shard.table()
        for column, array in columns.items():
            array[first : first + len(table)] = table[column]
        columns["ordinal"][first : first + len(table)] += np.uint64(shard.first_ordinal)
        first += len(table)
    return Documents(shards, columns=columns)
