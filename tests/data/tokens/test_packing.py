"""Packing: each document once and whole, in as few rows as best fit finds, the same every time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.lib.data.tokens.packing import one_per_row, pack

SEQ_LEN = 37  # prime: no document length divides it


def lengths_of(values):
    return np.array(values, dtype=np.int64)


@given(
    values=st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=200), seed=st.integers(0, 2**31)
)
def test_every_document_is_once_in_rows_of_which_any_two_are_fuller_than_one(values, seed):
    """Otherwise the second would never have been opened."""
    lengths = lengths_of(values)
    packing = pack(lengths, seq_len=SEQ_LEN, seed=seed)
    assert sorted(packing.documents) == list(range(len(values)))
    filled = sorted(int(lengths[packing.row(row)].sum()) for row in range(packing.num_rows))
    assert all(1 <= tokens <= SEQ_LEN for tokens in filled)
    assert sum(filled) == sum(values)
    assert packing.num_rows == 1 or filled[0] + filled[1] > SEQ_LEN


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([20, 25, 12], [[0], [1, 2]]), ([20, 15, 9, 8, 22], [[0, 2, 3], [1, 4]])],
)
def test_document_goes_to_the_fullest_row_with_room_or_two_close_a_row(lengths, expected):
    """Rows open with 20 and 25 of 37; 12 fits both and goes to 25, which it fills. Longest-first
    alone puts 20 and 15 into a row; 20 and 9 and 8 leave nothing free."""
    packing = pack(lengths_of(lengths), seq_len=SEQ_LEN, seed=0)
    rows = [sorted(packing.row(row).tolist()) for row in range(packing.num_rows)]
    assert sorted(rows) == expected


def test_row_order_depends_on_seed_alone():
    lengths = np.random.default_rng(0).integers(1, SEQ_LEN, size=101)
    first, second = (pack(lengths, seq_len=SEQ_LEN, seed=3) for _ in range(2))
    other = pack(lengths, seq_len=SEQ_LEN, seed=4)
    rows = [
        {tuple(packing.row(r).tolist()) for r in range(packing.num_rows)}
        for packing in (first, other)
    ]
    assert np.array_equal(first.documents, second.documents)
    assert not np.array_equal(first.documents, other.documents)
    assert rows[0] == rows[1]


def test_without_packing_each_document_has_a_row():
    packing = one_per_row(lengths_of([3, 1, 37, 5, 5]), seq_len=SEQ_LEN, seed=0)
    assert packing.num_rows == 5
    assert sorted(packing.documents) == [0, 1, 2, 3, 4]
