"""The keys of a corpus' documents in one file, band behind band.

Many processes write it, and it is scanned in blocks. A band of 10^8 documents is scanned once for
every range of keys that fits into memory, so it has to lie in one piece: a file for each shard
would be opened ten million times. Blocks are read, not mapped: what is scanned fills no memory. The
upper 32 of a key's 40 bits choose the range, so they lie apart from the lower 8, which are read of
the chosen ones alone. With 32 bits, documents by accident alike in a key would outnumber all others
(10^6 pairs in each band of 10^8 documents), and every such pair is measured.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

UPPER = np.dtype("<u4")
LOWER = np.dtype("u1")
LOWER_BITS = np.uint64(8 * LOWER.itemsize)

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class StoredKeys:
    """The keys of `documents` documents, `bands` of each, in the file `path`. All upper parts come
    first, then all lower ones."""

    path: Path
    documents: int
    bands: int

    def create(self) -> None:
        with self.path.open("wb") as file:
            file.truncate(self._offset(LOWER, self.bands, 0))

    def write(self, first: int, keys: Keys) -> None:
        """Write the keys, shape (bands, any), of the documents from number `first` on."""
        assert keys.shape[0] == self.bands, f"{keys.shape[0]} bands instead of {self.bands}"
        parts: list[tuple[np.dtype[Any], npt.NDArray[Any]]]
        parts = [(UPPER, (keys >> LOWER_BITS).astype(UPPER)), (LOWER, keys.astype(LOWER))]
        with self.path.open("r+b") as file:
            for kind, part in parts:
                for band, some in enumerate(part):
                    file.seek(self._offset(kind, band, first))
                    file.write(some.tobytes())

    def within(
        self, band: int, numbers: npt.NDArray[np.int64], *, lowest: int, beyond: int
    ) -> tuple[Keys, npt.NDArray[np.int64]]:
        """Return one band's keys in [lowest, beyond), and their positions in `numbers`. Their upper
        part is what is compared. numbers: of documents, ascending; all between the first and the
        last are read."""
        at = numbers - numbers[0]
        count = int(at[-1]) + 1
        upper = self._read(UPPER, band, int(numbers[0]), count)[at]
        inside = np.flatnonzero((upper >= lowest) & (upper < beyond))
        lower = self._read(LOWER, band, int(numbers[0]), count)[at[inside]]
        return (upper[inside].astype(np.uint64) << LOWER_BITS) | lower, inside

    def _read(self, kind: np.dtype[Any], band: int, first: int, count: int) -> npt.NDArray[Any]:
        offset = self._offset(kind, band, first)
        return np.fromfile(self.path, dtype=kind, count=count, offset=offset)

    def _offset(self, kind: np.dtype[Any], band: int, document: int) -> int:
        begin = 0 if kind == UPPER else self.bands * self.documents * UPPER.itemsize
        return begin + (band * self.documents + document) * kind.itemsize
