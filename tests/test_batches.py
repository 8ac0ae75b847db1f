"""From rows to tensors: hand-computed positions and targets, and every row on one process."""

import numpy as np
import pytest
import torch

from tests.models import random_store
from workflow.lib.batches import make_batch, micro_batches, process_rows

CPU = torch.device("cpu")


def test_a_masked_token_is_predicted_at_the_place_before_it() -> None:
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


def test_rows_without_targets_make_an_empty_batch() -> None:
    zeros = np.zeros((1, 3), dtype=np.int64)
    batch = make_batch(zeros, zeros, zeros.astype(bool), device=CPU)
    assert batch.positions.shape == batch.targets.shape == (0,)


def test_first_token_of_a_row_cannot_be_a_target() -> None:
    ids = np.zeros((1, 3), dtype=np.int64)
    with pytest.raises(AssertionError, match="no predecessor"):
        make_batch(ids, ids, np.array([[True, False, False]]), device=CPU)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 30])
def test_processes_share_the_rows_equally_and_each_row_once(size: int) -> None:
    rows = np.random.default_rng(0).permutation(30)
    shares = [process_rows(rows, rank=rank, size=size) for rank in range(size)]
    assert {len(share) for share in shares} == {30 // size}
    assert np.concatenate(shares).tolist() == rows.tolist()


def test_rows_that_cannot_be_shared_equally_are_refused() -> None:
    with pytest.raises(AssertionError, match="7 rows cannot be shared equally by 2 processes"):
        process_rows(np.arange(7), rank=0, size=2)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, 7])
def test_micro_batches_hold_the_rows_in_order(micro_batch_size: int) -> None:
    store = random_store(rows=11, seq_len=13)
    rows = np.array([3, 10, 0, 7, 5])
    batches = list(micro_batches(store, rows, micro_batch_size=micro_batch_size, device=CPU))
    assert max(len(b.input_ids) for b in batches) == min(micro_batch_size, len(rows))
    ids = torch.cat([b.input_ids for b in batches]).numpy()
    assert (ids == store.input_ids[rows]).all()
    assert sum(len(b.targets) for b in batches) == store.loss_mask[rows].sum()
    targets = torch.cat([b.targets for b in batches]).numpy()
    assert (targets == store.input_ids[rows][store.loss_mask[rows]]).all()
