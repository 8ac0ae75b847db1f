"""The documents of a corpus: a few numbers of each in memory, their tokens in the shards."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.encoded_shards import TABLE, Shard
from workflow.lib.data.tokens.token_store import Document

OPEN_SHARDS = 128  # shards that stay mapped; each has two files


class Documents:
    """All documents of a corpus. Attributes, each of shape (documents,): `lengths` tokens as kept,
    `full_lengths` of the whole row, `trained` tokens, `starts` first token in the shard, `rows`
    number of the row in its file, `ordinals` its number among all rows read, `digests` of the token
    ids, `groups` hash of the row's group (0: none), `desirable` whether a rated answer is good."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        counts = np.array([shard.documents for shard in shards], dtype=np.int64)
        self.shard_offsets = np.concatenate([[0], np.cumsum(counts)])
        assert self.shard_offsets[-1] < 2**32, "documents are numbered in 4 bytes"
        table = np.concatenate([np.empty(0, dtype=TABLE), *(shard.table() for shard in shards)])
        self.lengths: npt.NDArray[np.uint32] = table["length"].copy()
        self.full_lengths: npt.NDArray[np.uint32] = table["full_length"].copy()
        self.trained: npt.NDArray[np.uint32] = table["trained"].copy()
        self.rows: npt.NDArray[np.uint64] = table["row"].copy()
        self.digests: npt.NDArray[np.uint64] = table["digest"].copy()
        self.groups: npt.NDArray[np.uint64] = table["group"].copy()
        self.desirable: npt.NDArray[np.bool_] = table["desirable"].copy()
        firsts = np.array([shard.first_ordinal for shard in shards], dtype=np.uint64)
        self.ordinals: npt.NDArray[np.uint64] = table["ordinal"] + np.repeat(firsts, counts)
        tokens = np.array([shard.tokens for shard in shards], dtype=np.int64)
        ends = np.cumsum(self.lengths, dtype=np.int64)
        self.starts = ends - self.lengths - np.repeat(np.cumsum(tokens) - tokens, counts)
        self._mapped = lru_cache(OPEN_SHARDS)(lambda n: (shards[n].ids(), shards[n].mask()))

    def __len__(self) -> int:
        return int(self.shard_offsets[-1])

    def __getitem__(self, index: int) -> Document:
        """Return document `index`: (token ids uint32, loss mask bool), shape (length,), mapped."""
        ids, mask = self._mapped(self.shard_of(index))
        start = int(self.starts[index])
        span = slice(start, start + int(self.lengths[index]))
        return ids[span], mask[span]

    def gather(
        self, numbers: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return token ids, mask and lengths of some documents (at least one), end to end."""
        ids, masks = zip(*(self[number] for number in numbers.tolist()), strict=True)
        return np.concatenate(ids), np.concatenate(masks), self.lengths[numbers].astype(np.int64)

    def file(self, index: int) -> int:
        """Return the number of a document's file."""
        return self.shards[self.shard_of(index)].file

    def by_shard(
        self, chosen: npt.NDArray[np.uint32]
    ) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
        """Yield the ascending `chosen` documents shard by shard: number of the shard, and its
        documents."""
        edges = np.searchsorted(chosen, self.shard_offsets)
        for shard in np.flatnonzero(np.diff(edges)).tolist():
            yield shard, chosen[edges[shard] : edges[shard + 1]]

    def shard_of(self, index: int) -> int:
        return int(np.searchsorted(self.shard_offsets, index, side="right")) - 1
