"""Keys on disk: what many writers put side by side is read back band by band."""

from pathlib import Path

import numpy as np

from workflow.lib.stored_keys import StoredKeys


def test_keys_of_every_writer_are_read_in_their_place(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).integers(2**32, size=(3, 11), dtype=np.uint32)
    stored = StoredKeys(tmp_path / "keys", documents=11, bands=3)
    stored.create()
    for first, stop in ((7, 11), (0, 2), (2, 7)):
        stored.write(first, keys[:, first:stop])
    for band in range(3):
        assert stored.read(band, 0, 11).tolist() == keys[band].tolist()
        assert stored.read(band, 1, 8).tolist() == keys[band, 1:8].tolist()


def test_documents_without_keys_have_zeros(tmp_path: Path) -> None:
    stored = StoredKeys(tmp_path / "keys", documents=5, bands=2)
    stored.create()
    stored.write(3, np.full((2, 1), 7, dtype=np.uint32))
    assert [stored.read(band, 0, 5).tolist() for band in range(2)] == [[0, 0, 0, 7, 0]] * 2
