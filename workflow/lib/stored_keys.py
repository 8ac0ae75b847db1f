"""The keys of a corpus' documents in one file, band behind band, written by many processes and scanned in blocks.

A band of 10^8 documents is scanned once for every range of keys that fits into memory, so it has to
lie in one piece: a file for each shard would be opened ten million times. Blocks are read, not
mapped: what is scanned fills no memory.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

KEY = np.dtype("<u4")


@dataclass(frozen=True)
class StoredKeys:
    """The keys of `documents` documents, `bands` of each, in the file `path`."""

    path: Path
    documents: int
    bands: int

    def create(self) -> None:
        """Make the file, all keys 0."""
        with self.path.open("wb") as file:
            file.truncate(self.bands * self.documents * KEY.itemsize)

    def write(self, first: int, keys: npt.NDArray[np.uint32]) -> None:
        """Write the keys, shape (bands, any), of the documents from number `first` on."""
        assert keys.shape[0] == self.bands, f"{keys.shape[0]} bands instead of {self.bands}"
        with self.path.open("r+b") as file:
            for band, some in enumerate(keys.astype(KEY, copy=False)):
                file.seek(self._place(band, first))
                file.write(some.tobytes())

    def read(self, band: int, first: int, stop: int) -> npt.NDArray[np.uint32]:
        """Return one band's keys of the documents [first, stop)."""
        place = self._place(band, first)
        return np.fromfile(self.path, dtype=KEY, count=stop - first, offset=place)

    def _place(self, band: int, document: int) -> int:
        return (band * self.documents + document) * KEY.itemsize
