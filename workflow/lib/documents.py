"""Encoded documents in memory: four bytes per token id and one per mask entry, in flat growing arrays."""

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from workflow.lib.tokens import Document


class Documents:
    """Documents of one split in order, each with the file and number of its row; Python lists would take ten times the memory."""

    def __init__(self) -> None:
        self._ids = array("I")
        self._mask = bytearray()
        self._ends = array("q", [0])
        self._files = array("q")
        self._rows = array("q")
        self._ordinals = array("q")
        self._full_lengths = array("q")

    def append(
        self,
        ids: npt.NDArray[Any],
        mask: npt.NDArray[Any],
        *,
        file: int,
        row: int,
        ordinal: int,
        full_length: int,
    ) -> None:
        """Add a document that had `full_length` tokens before it was cut.

        It is from row number `row` of file number `file`, which is number `ordinal` of all rows read.
        """
        self._ids.frombytes(ids.astype(np.uint32, copy=False).tobytes())
        self._mask.extend(mask.astype(np.bool_, copy=False).tobytes())
        self._ends.append(len(self._ids))
        self._files.append(file)
        self._rows.append(row)
        self._ordinals.append(ordinal)
        self._full_lengths.append(full_length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Document:
        """Return copies of document `index`: (token ids uint32, loss mask bool), shape (length,)."""
        start, stop = self._ends[index], self._ends[index + 1]
        ids = np.frombuffer(self._ids[start:stop], dtype=np.uint32)
        return ids, np.frombuffer(self._mask[start:stop], dtype=np.bool_)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document as kept."""
        ends = np.array(self._ends, dtype=np.int64)
        return ends[1:] - ends[:-1]

    @property
    def full_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document before it was cut."""
        return np.array(self._full_lengths, dtype=np.int64)

    @property
    def files(self) -> npt.NDArray[np.int64]:
        """Number of the file that each document came from."""
        return np.array(self._files, dtype=np.int64)

    @property
    def ordinals(self) -> npt.NDArray[np.int64]:
        """Number among all rows read of the row that each document came from."""
        return np.array(self._ordinals, dtype=np.int64)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Number of the row that each document came from."""
        return np.array(self._rows, dtype=np.int64)
