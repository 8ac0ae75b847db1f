"""Keys on disk: what many writers put side by side is read back band by band."""

from pathlib import Path

import numpy as np

from workflow.lib.data.tokens.repetition.shingle_keys import StoredKeys

EVERY = {"lowest": 0, "beyond": 2**32}


def test_keys_of_every_writer_are_read_in_their_place(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).integers(2**40, size=(3, 11), dtype=np.uint64)
    stored = StoredKeys(tmp_path / "keys", documents=11, bands=3)
    stored.create()
    for first, stop in ((7, 11), (0, 2), (2, 7)):
        stored.write(first, keys[:, first:stop])
    numbers = np.array([1, 2, 5, 9])
    for band in range(3):
        range_keys, positions = stored.within(band, numbers, **EVERY)
        assert range_keys.tolist() == keys[band, numbers].tolist()
        assert positions.tolist() == [0, 1, 2, 3]


def test_keys_of_a_range_are_those_with_their_upper_part_in_it(tmp_path: Path) -> None:
    uppers = np.array([[5, 7, 6, 2**32 - 1, 0]], dtype=np.uint64)
    stored = StoredKeys(tmp_path / "keys", documents=5, bands=1)
    stored.create()
    stored.write(0, (uppers << np.uint64(8)) + np.uint64(255))
    for lowest, beyond, expected in ((5, 7, [0, 2]), (7, 2**32, [1, 3]), (0, 1, [4])):
        range_keys, positions = stored.within(0, np.arange(5), lowest=lowest, beyond=beyond)
        assert positions.tolist() == expected
        assert range_keys.tolist() == [
            256 * int(uppers[0, position]) + 255 for position in expected
        ]


def test_documents_without_keys_have_zeros(tmp_path: Path) -> None:
    stored = StoredKeys(tmp_path / "keys", documents=5, bands=2)
    stored.create()
    stored.write(3, np.full((2, 1), 2**39 + 7, dtype=np.uint64))
    for band in range(2):
        range_keys, _ = stored.within(band, np.arange(5), **EVERY)
        assert range_keys.tolist() == [0, 0, 0, 2**39 + 7, 0]
