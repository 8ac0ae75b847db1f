"""Keys of queries by groups of lengths, beside those of each document."""

import numpy as np
import pytest

from workflow.lib.kernels.attention.answer_rows import (
    are_equal,
    computed_keys,
    equal_lengths,
    grouped,
)
from workflow.lib.kernels.attention.attention_choice import FLEX_BLOCK

UNEVEN = np.minimum(np.random.default_rng(0).lognormal(5, 1.5, 3000).astype(int) + 1, 4096)


def keys_of_each(lengths, window=None):
    """Of every token of every document, one by one, with half a block on each edge."""
    pairs, tokens = 0.0, 0
    for length in lengths.tolist():
        seen = min(window or length, length)
        within = seen * (seen - 1) / 2 + (length - seen + 1) * seen  # of the first ones, and all
        edges = FLEX_BLOCK if seen < length else (FLEX_BLOCK - 1) / 2
        pairs, tokens = pairs + within + edges * length, tokens + length
    return pairs / tokens


@pytest.mark.parametrize("window", [None, 512, 1024, 2047, 4096, 100_000])
def test_keys_are_those_of_each_document_for_no_window_and_those_of_a_power_of_two(window):
    found = computed_keys(grouped([UNEVEN]), window)
    assert found == pytest.approx(keys_of_each(UNEVEN, window), rel=1e-3)  # (B - 1) / 2 is B / 2


def test_other_windows_are_nearly_as_exact():
    for window in (700, 1000, 1500):
        found = computed_keys(grouped([UNEVEN]), window)
        assert found == pytest.approx(keys_of_each(UNEVEN, window), rel=0.02)


def test_documents_of_chunks_see_no_more_than_their_own():
    length, chunk = 4096, 1024
    found = computed_keys(equal_lengths(length), chunk=chunk)
    assert found == computed_keys(equal_lengths(chunk))
    assert computed_keys(equal_lengths(512), chunk=chunk) == computed_keys(equal_lengths(512))


def test_groups_of_parts_are_those_of_the_whole():
    assert grouped([UNEVEN[:1000], UNEVEN[1000:]]) == grouped([UNEVEN])
    assert sum(group.documents for group in grouped([UNEVEN])) == len(UNEVEN)
    assert sum(group.squares for group in grouped([UNEVEN])) == (UNEVEN**2).sum()


def test_lengths_are_equal_where_every_document_has_the_same():
    assert are_equal(grouped([np.full(7, 300)]))
    assert are_equal(equal_lengths(2048 / 3.7))
    assert not are_equal(grouped([np.array([300, 300, 301])]))
