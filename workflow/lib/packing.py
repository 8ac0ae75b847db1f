"""Documents to rows of `seq_len` tokens: best-fit decreasing, offline and deterministic.

Longest first, each document goes into the row whose free space it leaves smallest; a new row is opened
only where none has room. Documents are never cut, so a row ends in padding if nothing fits. Rows are
kept by their free space, and the smallest sufficient space is found by bisection.
Source: best-fit decreasing, D. S. Johnson, "Near-optimal bin packing algorithms" (1973); for training
data: Ding et al., arXiv 2404.10830.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Packing:
    """Which documents each row holds: row r holds `documents[offsets[r] : offsets[r + 1]]`, in that order."""

    documents: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    def row(self, index: int) -> npt.NDArray[np.int64]:
        """Document numbers of row `index`, in the order in which they stand."""
        return self.documents[self.offsets[index] : self.offsets[index + 1]]


def pack(lengths: npt.NDArray[np.int64], *, seq_len: int, seed: int) -> Packing:
    """Pack documents of `lengths` tokens (each 1 to `seq_len`) into as few rows as best fit finds.

    The order of the rows is a pure function of their number and `seed`.
    """
    _check_lengths(lengths, seq_len)
    rows = _best_fit(lengths, seq_len)
    num_rows = int(rows.max()) + 1
    shuffled = _row_order(num_rows, seed)[rows]
    documents = np.lexsort((np.arange(len(lengths)), -lengths, shuffled))
    return _packing(documents, np.bincount(shuffled, minlength=num_rows))


def one_per_row(lengths: npt.NDArray[np.int64], *, seq_len: int, seed: int) -> Packing:
    """Give each document a row of its own, in the order that `pack` would give so many rows."""
    _check_lengths(lengths, seq_len)
    documents = np.argsort(_row_order(len(lengths), seed))
    return _packing(documents, np.ones(len(lengths), dtype=np.int64))


def _best_fit(lengths: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int64]:
    """Return the row of each document, shape (documents,)."""
    row_of = np.empty(len(lengths), dtype=np.int64)
    rows_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # the free spaces for which there is a row, ascending
    num_rows = 0
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            row, space = num_rows, seq_len
            num_rows += 1
        else:
            space = spaces[place]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del rows_by_space[space], spaces[place]
        row_of[document] = row
        left = space - length
        if left and left not in rows_by_space:
            insort(spaces, left)
        if left:
            rows_by_space.setdefault(left, []).append(row)
    return row_of


def _row_order(num_rows: int, seed: int) -> npt.NDArray[np.int64]:
    """Return where each row goes."""
    return np.random.Generator(np.random.PCG64(seed)).permutation(num_rows)


def _packing(documents: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> Packing:
    return Packing(documents=documents, offsets=np.concatenate(([0], np.cumsum(counts))))


def _check_lengths(lengths: npt.NDArray[np.int64], seq_len: int) -> None:
    assert len(lengths), "there is no document to pack"
    assert lengths.min() >= 1, "a document is empty"
    assert lengths.max() <= seq_len, "a document is longer than a row"
