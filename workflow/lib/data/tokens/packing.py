"""Documents to rows of `seq_len` tokens: best-fit decreasing, offline and deterministic.

The longest remaining document opens a row; one document or two close it exactly if possible, else
the longest that fits goes in. Documents are never cut. The search works on the remaining *lengths*,
as bits of one integer: one shift and one AND find pairs that close a space.

Source: best-fit decreasing, D. S. Johnson, "Near-optimal bin packing algorithms" (1973); rows
closed one at a time, Gupta and Ho, "A new heuristic algorithm for the one-dimensional bin-packing
problem" (1999); for training data: Ding et al., arXiv 2404.10830."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Packing:
    """The documents of each row: `documents[offsets[r] : offsets[r + 1]]`, in that order."""

    documents: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents in row `index`."""
        return self.documents[self.offsets[index] : self.offsets[index + 1]]

    def units_to_documents(self, sizes: npt.NDArray[np.int64]) -> "Packing":
        """Return the packing of single documents, where packed unit u is `sizes[u]` documents."""
        packed, firsts = sizes[self.documents], (np.cumsum(sizes) - sizes)[self.documents]
        ends = np.cumsum(packed)
        documents = np.repeat(firsts - ends + packed, packed) + np.arange(ends[-1])
        return Packing(documents=documents, offsets=np.concatenate(([0], ends))[self.offsets])


def pack(lengths: npt.NDArray[np.int64], *, seq_len: int, seed: int) -> Packing:
    """Pack documents of `lengths` tokens (each 1 to `seq_len`) into as few rows as best fit finds.
    The order of the rows is a pure function of their number and `seed`."""
    _check_lengths(lengths, seq_len)
    packed, sizes = _fill_rows(lengths, seq_len)
    documents = np.empty(len(lengths), dtype=np.int64)
    documents[np.argsort(packed, kind="stable")] = np.argsort(lengths, kind="stable")
    return _in_order(documents, sizes, seed)


def one_per_row(lengths: npt.NDArray[np.int64], *, seq_len: int, seed: int) -> Packing:
    """Give each document its own row, in the order of `pack` for as many rows."""
    _check_lengths(lengths, seq_len)
    return _in_order(np.arange(len(lengths)), np.ones(len(lengths), dtype=np.int64), seed)


def text_lengths(
    position_ids: npt.NDArray[Any], loss_mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the tokens of each row (rows,) before its padding, the last, untrained document."""
    seq_len = position_ids.shape[1]
    last = seq_len - 1 - np.argmax(position_ids[:, ::-1] == 0, axis=1)
    trained = (loss_mask & (np.arange(seq_len) >= last[:, None])).any(axis=1)
    lengths: npt.NDArray[np.int64] = np.where(trained, seq_len, last)
    return lengths


class _Lengths:
    """The lengths of the remaining documents: the number of each, and the present ones as bits."""

    def __init__(self, lengths: npt.NDArray[np.int64], seq_len: int) -> None:
        self._seq_len = seq_len
        self._counts = np.bincount(lengths, minlength=seq_len + 1).tolist()
        present = [length for length, count in enumerate(self._counts) if count]
        self.bits = sum(1 << length for length in present)  # bit l: there is a document of l tokens
        self._mirrored = sum(1 << (seq_len - length) for length in present)

    def longest_within(self, space: int) -> int:
        """Return the longest length of at most `space`, 0 without one."""
        return max(0, (self.bits & ((2 << space) - 1)).bit_length() - 1)

    def pair_of(self, total: int) -> tuple[int, int] | None:
        """Return two lengths whose sum is `total`, the first as long as possible."""
        sums = self.bits & (self._mirrored >> (self._seq_len - total))
        first = sums.bit_length() - 1
        if 2 * first == total and self._counts[first] == 1:
            return None  # the only document of this length is no pair, and no first one is longer
        return (first, total - first) if first > 0 else None

    def take(self, length: int) -> int:
        self._counts[length] -= 1
        if not self._counts[length]:
            self.bits ^= 1 << length
            self._mirrored ^= 1 << (self._seq_len - length)
        return length


def _fill_rows(
    lengths: npt.NDArray[np.int64], seq_len: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the lengths of all rows, concatenated, and the number in each row."""
    remaining = _Lengths(lengths, seq_len)
    packed: list[int] = []
    sizes: list[int] = []
    while remaining.bits:
        before = len(packed)
        _fill_row(packed, remaining, seq_len)
        sizes.append(len(packed) - before)
    return np.array(packed, dtype=np.int64), np.array(sizes, dtype=np.int64)


def _fill_row(packed: list[int], remaining: _Lengths, space: int) -> None:
    longest = remaining.longest_within(space)
    while longest:
        pair = remaining.pair_of(space) if longest < space else None
        for length in pair or (longest,):
            packed.append(remaining.take(length))
            space -= length
        longest = remaining.longest_within(space)


def _in_order(documents: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], seed: int) -> Packing:
    """Return the rows in an order drawn from `seed`: row r was filled `order[r]`-th."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(sizes))
    starts = np.cumsum(sizes) - sizes
    offsets = np.concatenate(([0], np.cumsum(sizes[order])))
    within = np.arange(len(documents)) - np.repeat(offsets[:-1], sizes[order])
    return Packing(
        documents=documents[np.repeat(starts[order], sizes[order]) + within], offsets=offsets
    )


def _check_lengths(lengths: npt.NDArray[np.int64], seq_len: int) -> None:
    assert len(lengths), "there is no document to pack"
    assert lengths.min() >= 1, "a document is empty"
    assert lengths.max() <= seq_len, "a document is longer than a row"
