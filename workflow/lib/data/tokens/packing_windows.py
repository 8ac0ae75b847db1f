"""Stretches of a split that fit into memory: packed together, or written at a time.

A window takes every n-th shard, so each is a fair sample of the whole, however the data are sorted,
and packs as well as the whole would. Only the tokens of one window are in memory.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.documents import Documents, offsets_of
from workflow.lib.data.tokens.packing import one_per_row, pack
from workflow.lib.data.tokens.splits import Split
from workflow.lib.data.tokens.token_writer import Window, spans

WINDOW_TOKENS = 2**24  # 80 MiB of ids and masks, 144 with weights; at a seq_len of 4096, 4096 rows
WINDOW_ROWS = 64  # rows of a window at least: the last one of each may stay half empty

Part = tuple[int, npt.NDArray[np.uint32]]


def packing_windows(
    split: Split, *, seq_len: int, seed: int, packing: bool, window_tokens: int = WINDOW_TOKENS
) -> Iterator[Window]:
    """Yield a split in windows of about `window_tokens`, packed or one document a row."""
    pack_rows = pack if packing else one_per_row
    parts = list(split.documents.by_shard(split.chosen))
    tokens = sum(split.documents.shards[shard].tokens for shard, _ in parts)
    count = math.ceil(tokens / max(window_tokens, WINDOW_ROWS * seq_len))
    weighted = has_weights(split)
    for first in range(count):
        some = parts[first::count]
        if some:
            ids, mask, starts, lengths = _load(split.documents, some)
            packed = pack_rows(lengths, seq_len=seq_len, seed=seed)
            shards = [split.documents.shards[shard] for shard, _ in some]
            weights = np.concatenate([s.weights() for s in shards]) if weighted else None
            yield Window(ids, mask, starts, lengths, packed, weights)


def has_weights(split: Split) -> bool:
    """Whether some tokens of a split's shards have a weight other than 0 and 1."""
    documents = split.documents
    return any(documents.shards[shard].has_weights for shard, _ in documents.by_shard(split.chosen))


def _load(documents: Documents, parts: Sequence[Part]) -> tuple[Any, Any, Any, Any]:
    """Return the shards' ids and masks, and start and length of each chosen document in them."""
    shards = [documents.shards[shard] for shard, _ in parts]
    begins = np.cumsum([0, *(shard.tokens for shard in shards)])
    starts, lengths = [], []
    for begin, (shard, chosen) in zip(begins, parts, strict=False):
        offsets = offsets_of(documents.shards[shard].table()["length"])
        positions = chosen - documents.shard_offsets[shard]
        starts.append(begin + offsets[positions])
        lengths.append(offsets[positions + 1] - offsets[positions])
    return (
        np.concatenate([shard.ids() for shard in shards]),
        np.concatenate([shard.mask() for shard in shards]),
        np.concatenate(starts),
        np.concatenate(lengths),
    )


def blocks(split: Split) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (ids, mask, lengths) of a split's documents in order, a shard's at a time."""
    for part in split.documents.by_shard(split.chosen):
        ids, mask, starts, lengths = _load(split.documents, [part])
        source = spans(starts, lengths)
        yield ids[source], mask[source], lengths
