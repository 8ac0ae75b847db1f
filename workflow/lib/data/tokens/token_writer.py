"""Writing of the tokens folder: packed rows window by window, and held-out documents one by one.

A window takes every n-th shard, so each is a fair sample of the whole, for any order of the data,
and packs as well as the whole would. Only the tokens of one window are in memory."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from workflow.lib.data.tokens.encoded_shards import Documents, Shard
from workflow.lib.data.tokens.packing import Packing, one_per_row, pack
from workflow.lib.data.tokens.splits import Split
from workflow.lib.data.tokens.token_store import ARRAYS, DESIRABLE, OPTIONAL_ARRAYS, WEIGHTS, Array

BLOCK_TOKENS = 2**19  # tokens of rows assembled in memory at a time
WINDOW_TOKENS = 2**24  # 80 MiB of ids and masks, 144 with weights; at a seq_len of 4096, 4096 rows
WINDOW_ROWS = 64  # rows of a window at least: the last one may stay half empty
Part = tuple[int, npt.NDArray[np.uint32]]
# A shard's optional arrays, beside ids and masks.
OPTIONAL_READERS: dict[str, Callable[[Shard], Array]] = {
    **dict.fromkeys(WEIGHTS, Shard.weights),
    **dict.fromkeys(DESIRABLE, Shard.desirable),
}


@dataclass(frozen=True)
class Window:
    """Documents packed together; document d: `ids[starts[d] : starts[d] + lengths[d]]`."""

    ids: npt.NDArray[np.uint32]
    mask: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    packing: Packing
    optional: Mapping[str, Array] = field(default_factory=dict)
    """As `mask`: the optional arrays of the split, by name."""


class ArrayWriter:
    """Writes a `.npy` file front to back; its number of rows is known at the end."""

    def __init__(self, path: Path, *, row_shape: tuple[int, ...] = ()) -> None:
        self._dtype = np.dtype((ARRAYS | OPTIONAL_ARRAYS)[path.name])
        self._row_shape = row_shape
        self.rows = 0
        self._file = path.open("wb")
        self._write_header()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Rewrite the header, and fsync the file."""
        end = self._file.tell()
        self._file.seek(0)
        self._write_header()
        self._file.seek(end)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_header(self) -> None:
        """Write the header for the rows so far; NumPy leaves room for the first axis to grow."""
        shape = (self.rows, *self._row_shape)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, array: Array) -> None:
        """Append rows of the array's row shape, converted to its dtype."""
        assert array.shape[1:] == self._row_shape, f"rows of shape {array.shape[1:]}"
        array.astype(self._dtype, copy=False).tofile(self._file)
        self.rows += len(array)


def write_train(
    folder: Path,
    windows: Iterable[Window],
    *,
    seq_len: int,
    pad_token_id: int,
    optional: Collection[str] = (),
) -> int:
    """Write the training arrays into `folder` by windows; return the rows. optional: names of
    optional ones."""
    with ExitStack() as stack:
        writers = [
            stack.enter_context(ArrayWriter(folder / name, row_shape=(seq_len,)))
            for name in [*ARRAYS, *optional]
            if name.startswith("train.")
        ]
        for window in windows:
            assert not window.mask[window.starts].any(), (
                "the first token of a document cannot be a target"
            )
            for parts in _packed_rows(window, seq_len, pad_token_id):
                for writer, part in zip(writers, parts, strict=True):
                    writer.append(part)
    return writers[0].rows


def _packed_rows(window: Window, seq_len: int, pad_token_id: int) -> Iterator[tuple[Array, ...]]:
    """Yield (ids, mask, positions), and the window's optional arrays, (rows, seq_len) each."""
    packing, step = window.packing, max(1, BLOCK_TOKENS // seq_len)
    for first in range(0, packing.num_rows, step):
        offsets = packing.offsets[first : first + step + 1]
        documents = packing.documents[offsets[0] : offsets[-1]]
        lengths, starts = window.lengths[documents], window.starts[documents]
        # tokens of the block before each document
        before = np.concatenate(([0], np.cumsum(lengths)))
        row_starts = before[offsets - offsets[0]]
        fill = np.diff(row_starts)
        rows = np.repeat(np.arange(len(fill)), np.diff(offsets))
        target_starts = rows * seq_len + before[:-1] - row_starts[rows]
        source, target = spans(starts, lengths), spans(target_starts, lengths)
        ids = np.full(len(fill) * seq_len, pad_token_id, dtype=np.uint32)
        mask = np.zeros(len(fill) * seq_len, dtype=np.bool_)
        # The padding is one more document: its positions begin where the last one ends.
        positions = (np.arange(seq_len, dtype=np.int32) - fill[:, None].astype(np.int32)).ravel()
        ids[target], mask[target] = window.ids[source], window.mask[source]
        positions[target] = spans(np.zeros_like(lengths), lengths)
        parts = [ids, mask, positions]
        for values in window.optional.values():
            parts.append(np.zeros(len(ids), dtype=values.dtype))
            parts[-1][target] = values[source]
        yield tuple(part.reshape(len(fill), seq_len) for part in parts)


def spans(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers from each start on, as many as its length, concatenated."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


def write_heldout(
    folder: Path, documents: Iterable[tuple[Array, ...]], *, optional: Collection[str] = ()
) -> None:
    """Write the held-out arrays into `folder`, one document after the other. documents: some at a
    time, as (ids, mask, *optional, lengths), their tokens concatenated."""
    lengths = [np.zeros(1, dtype=np.int64)]
    names = ["heldout.input_ids.npy", "heldout.loss_mask.npy", *optional]
    with ExitStack() as stack:
        writers = [stack.enter_context(ArrayWriter(folder / name)) for name in names]
        offsets = stack.enter_context(ArrayWriter(folder / "heldout.offsets.npy"))
        for *parts, part_lengths in documents:
            for writer, part in zip(writers, parts, strict=True):
                writer.append(part)
            lengths.append(part_lengths.astype(np.int64))
        offsets.append(np.cumsum(np.concatenate(lengths)))


def packing_windows(
    split: Split, *, seq_len: int, seed: int, packing: bool, window_tokens: int = WINDOW_TOKENS
) -> Iterator[Window]:
    """Yield a split in windows of about `window_tokens`, packed or one document a row."""
    parts = list(split.documents.by_shard(split.chosen))
    tokens = sum(split.documents.shards[shard].tokens for shard, _ in parts)
    count = math.ceil(tokens / max(window_tokens, WINDOW_ROWS * seq_len))
    names = optional_arrays(split)
    for first in range(count):
        window_parts = parts[first::count]
        if window_parts:
            ids, mask, starts, lengths = _load(split.documents, window_parts)
            pack_rows = partial(pack if packing else one_per_row, seq_len=seq_len, seed=seed)
            units = lengths.reshape(-1, split.unit).sum(1)
            packed = pack_rows(units).units_to_documents(np.full(len(units), split.unit))
            shards = [split.documents.shards[shard] for shard, _ in window_parts]
            optional = {
                name: np.concatenate([OPTIONAL_READERS[name](shard) for shard in shards])
                for name in names
            }
            yield Window(ids, mask, starts, lengths, packed, optional)


def optional_arrays(split: Split) -> list[str]:
    """Return the optional arrays of a split: weights if some token has one other than 0 and 1, and
    whether answers are good."""
    documents = split.documents
    shards = (documents.shards[shard] for shard, _ in documents.by_shard(split.chosen))
    names: Collection[str] = ()
    if split.examples == "rated":
        names = DESIRABLE
    elif any(shard.has_weights for shard in shards):
        names = WEIGHTS
    return [name for name in names if name.startswith(f"{split.name}.")]


def _load(documents: Documents, parts: Sequence[Part]) -> tuple[Any, Any, Any, Any]:
    """Return the shards' ids and masks, and start and length of each chosen document in them."""
    shards = [documents.shards[shard] for shard, _ in parts]
    begins = np.cumsum([0, *(shard.tokens for shard in shards[:-1])])
    chosen = np.concatenate([numbers for _, numbers in parts])
    return (
        np.concatenate([shard.ids() for shard in shards]),
        np.concatenate([shard.mask() for shard in shards]),
        np.repeat(begins, [len(numbers) for _, numbers in parts]) + documents.starts[chosen],
        documents.lengths[chosen].astype(np.int64),
    )


def blocks(split: Split) -> Iterator[tuple[Any, ...]]:
    """Yield (ids, mask, *optional arrays, lengths) in order, a shard's at a time."""
    names = optional_arrays(split)
    for part in split.documents.by_shard(split.chosen):
        ids, mask, starts, lengths = _load(split.documents, [part])
        shard, source = split.documents.shards[part[0]], spans(starts, lengths)
        yield (
            ids[source],
            mask[source],
            *(OPTIONAL_READERS[name](shard)[source] for name in names),
            lengths,
        )
