"""From rows to tensors: hand-computed positions and targets, and every row on one process."""

import numpy as np
import pytest
import torch

from tests.support.models import random_store
from workflow.lib.data.tokens.packing import text_lengths
from workflow.lib.training.batches import (
    RowGroup,
    attention_costs,
    make_batch,
    micro_batches,
    process_rows,
)

CPU = torch.device("cpu")


def test_a_masked_token_is_predicted_at_the_place_before_it():
    ids = np.array([[10, 11, 12, 13], [20, 21, 22, 23]])
    places = np.array([[0, 1, 2, 3], [0, 1, 0, 1]])
    mask = np.array([[0, 0, 1, 1], [0, 1, 0, 1]], dtype=bool)
    batch = make_batch(ids, places, mask, device=CPU)
    assert batch.positions.tolist() == [1, 2, 4, 6]
    assert batch.targets.tolist() == [12, 13, 21, 23]
    assert batch.input_ids.tolist() == ids.tolist()
    assert batch.position_ids.tolist() == places.tolist()
    tensors = (batch.input_ids, batch.position_ids, batch.positions, batch.targets)
    assert {t.dtype for t in tensors} == {torch.int64}


def test_first_token_of_a_row_cannot_be_a_target():
    ids = np.zeros((1, 3), dtype=np.int64)
    with pytest.raises(AssertionError, match="no predecessor"):
        make_batch(ids, ids, np.array([[True, False, False]]), device=CPU)


def test_last_document_without_targets_is_padding():
    """A row with a padding tail, one that ends in a trained document, one of a single document."""
    positions = np.array([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    trained = np.zeros(positions.shape, dtype=bool)
    trained[0, 1] = trained[1, 5] = trained[2, 1] = True
    assert text_lengths(positions, trained).tolist() == [3, 6, 6]


def test_attention_cost_is_the_sum_of_squared_document_lengths():
    places = np.array([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]], dtype=np.int32)
    assert attention_costs(places).tolist() == [9 + 4, 25, 5]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 30])
def test_processes_share_the_rows_equally_and_each_row_once(size):
    rows = np.random.default_rng(0).permutation(30)
    costs = np.random.default_rng(1).integers(1, 9, size=30)
    shares = [process_rows(rows, costs, rank=rank, size=size) for rank in range(size)]
    assert {len(share) for share in shares} == {30 // size}
    assert sorted(np.concatenate(shares)) == list(range(30))


def test_processes_take_rows_of_neighbouring_cost_at_the_same_time():
    rows, costs = np.array([7, 4, 9, 2, 5, 8]), np.array([10, 60, 30, 20, 50, 40])
    shares = [process_rows(rows, costs, rank=rank, size=2).tolist() for rank in range(2)]
    assert shares == [[4, 9, 2], [5, 8, 7]]  # costs 60, 30, 20 and 50, 40, 10


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_dealt_rows_wait_less_than_rows_in_drawn_order(micro_batch_size):
    """Waiting: what the slowest process computes at each micro-batch beyond the mean of all."""
    costs = np.random.default_rng(0).lognormal(size=(50, 128)).astype(np.int64) + 1

    def waiting(shares):
        slots = np.array(shares).reshape(8, -1, micro_batch_size).sum(axis=2)
        return float(slots.max(axis=0).sum() / slots.mean(axis=0).sum()) - 1

    rows = np.arange(128)
    drawn = [waiting([step[16 * rank : 16 * (rank + 1)] for rank in range(8)]) for step in costs]
    dealt = [
        waiting([step[process_rows(rows, step, rank=rank, size=8)] for rank in range(8)])
        for step in costs
    ]
    assert np.mean(dealt) < 0.25 * np.mean(drawn)


def test_rows_that_cannot_be_shared_equally_are_refused():
    with pytest.raises(AssertionError, match="7 rows cannot be shared equally by 2 processes"):
        process_rows(np.arange(7), np.ones(7, dtype=np.int64), rank=0, size=2)


def test_next_micro_batch_is_made_while_one_is_computed():
    store, made = random_store(rows=4, seq_len=8), []

    def look_up(ids):
        made.append(ids)
        return ids[:, None].float()

    batches = micro_batches(
        store, [RowGroup(np.array([row]), [0]) for row in range(4)], device=CPU, look_up=look_up
    )
    first = next(batches)
    batches.close()  # waits for the one that is being made, and makes no other
    assert len(made) == 2
    assert (first.embedded[:, 0].long() == first.input_ids.flatten()).all()


def test_micro_batch_that_cannot_be_made_stops_the_step():
    store = random_store(rows=4, seq_len=8)
    batches = micro_batches(store, [RowGroup(np.array([row]), [0]) for row in (0, 9)], device=CPU)
    next(batches)
    with pytest.raises(IndexError):
        next(batches)
