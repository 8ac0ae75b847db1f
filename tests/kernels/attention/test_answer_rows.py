"""Which tokens are left of rows of answers to prompts, and the counts of such rows."""

import numpy as np
import pytest
import torch

from tests.kernels.attention.test_shared_prompts import GROUPS, POSITIONS
from workflow.benchmark.random_pairs import pair_rows, random_pairs
from workflow.lib.kernels.attention.answer_rows import (
    DRAWN,
    MOST_ROWS,
    RowCounter,
    RowCounts,
    answer_rows,
    are_equal,
    computed_keys,
    equal_lengths,
    grouped,
    kept_tokens,
    padded_length,
)
from workflow.lib.kernels.attention.attention_choice import FLEX_BLOCK
from workflow.lib.kernels.attention.flex_masks import MaskKind
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts, prompt_mask
from workflow.lib.training.batches import shared_lengths, stored_batch

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


def test_prompt_before_the_first_trained_token_is_left_once():
    ids = np.array([[5, 6, 7, 8, 5, 6, 7, 9, 9, 0, 0]])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]])
    trained = positions >= 2
    trained[0, 9:] = False
    # two tokens of the prompt are common; the third is trained in both
    assert kept_tokens(ids, positions, trained, paired=True).tolist() == [
        [True, True, True, True, False, True, True, True, True, False, False]
    ]


def test_prompt_of_a_group_is_left_once_and_other_prompts_are_whole():
    ids = np.array([[5, 6, 8, 5, 6, 9, 9, 5, 6, 7, 5, 6, 7, 5, 7, 5, 0, 0]])
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]])
    trained = positions >= 2
    trained[0, 10:13] = [False, True, True]  # begins like the others, and its prompt is shorter
    kept = kept_tokens(ids, positions, trained, paired=False).astype(int)
    assert kept.tolist() == [[1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]]


@pytest.mark.parametrize("positions", [POSITIONS, GROUPS])
def test_counts_of_a_row_are_those_of_its_tensors(positions):
    counter = RowCounter(seq_len=64)
    counter.add(positions[0], trained=7)
    rows = counter.counted()
    padding = np.arange(64 - positions.size)
    padded = np.concatenate([positions[0], padding])[None]
    shared = SharedPrompts.of(padded)
    keys = len(shared.keys) - padded.size
    assert (rows.largest,) == rows.rows == (RowCounts(64, len(shared.bounds) - 1, keys, 7),)
    assert rows.copies == len(shared.copies)
    seen = prompt_mask(torch.from_numpy(padded), MaskKind()).sum()
    assert sum(group.squares + group.tokens for group in rows.documents) == 2 * seen


def test_rows_are_counted_as_they_are_trained():
    store = pair_rows(random_pairs(60, seq_len=2048, vocab_size=97), seq_len=2048)
    every = np.arange(store.num_rows)
    rows = answer_rows(store.input_ids, store.position_ids, store.loss_mask, paired=True)
    lengths = [padded_length(n, seq_len=2048) for n in shared_lengths(store, every)]
    batches = [
        stored_batch(store, every[n : n + 1], row_tokens=lengths[n]) for n in range(store.num_rows)
    ]
    expected = [
        (n, len(x.bounds[0]) - 1, len(x.shared.keys) - n, len(x.targets))
        for x, n in zip(batches, lengths, strict=True)
    ]
    assert sorted(rows.rows) == sorted(expected)
    longest = [x for x, n in zip(batches, lengths, strict=True) if n == max(lengths)]
    assert rows.largest.trained == max(len(x.targets) for x in longest)


def test_many_rows_are_described_by_some():
    counter = RowCounter(seq_len=4096)
    for length in range(1, 4001):
        counter.add(np.arange(length), trained=length)
    rows = counter.counted()
    assert len(rows.rows) == MOST_ROWS
    assert np.mean([row.trained for row in rows.rows]) == pytest.approx(2000.5, rel=1e-3)
    assert rows.largest.trained == 4000
    (drawn,) = {*rows.micro_batches(processes=2, rows=3).shape[:3]} - {2, 3}
    assert drawn == DRAWN
