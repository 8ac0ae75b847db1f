"""From rows of the tokens folder to the tensors of a forward pass."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.attention import document_bounds
from workflow.lib.tokens import TokenStore


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: input_ids, position_ids (rows, seq_len); positions, targets (trained tokens,). All int64.

    bounds: `attention.document_bounds` of the rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    bounds: tuple[torch.Tensor, int]


def attention_costs(position_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the attention cost of each row of (rows, seq_len): the sum of the squared lengths of its documents.

    A document of n tokens has the positions 0 to n - 1, and the sum of 2 p + 1 over them is n squared.
    """
    sums: npt.NDArray[np.int64] = position_ids.sum(axis=1, dtype=np.int64)
    costs: npt.NDArray[np.int64] = 2 * sums + position_ids.shape[1]
    return costs


def process_rows(
    rows: npt.NDArray[np.int64], costs: npt.NDArray[np.int64], *, rank: int, size: int
) -> npt.NDArray[np.int64]:
    """Return the part of a step's rows that process `rank` of `size` trains on, in the order in which it does.

    All processes wait for the slowest at every micro-batch. So the rows are dealt like cards, the costliest
    first and every second round backwards: the processes take rows of neighbouring cost at the same time.
    """
    assert len(rows) % size == 0, f"{len(rows)} rows cannot be shared equally by {size} processes"
    rounds = rows[np.argsort(-costs, kind="stable")].reshape(-1, size)
    rounds[1::2] = rounds[1::2, ::-1]
    return rounds[:, rank]


def micro_batches(
    store: TokenStore, rows: npt.NDArray[np.int64], *, micro_batch_size: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Yield the rows as micro-batches of `micro_batch_size` on `device`."""
    for start in range(0, len(rows), micro_batch_size):
        chosen = rows[start : start + micro_batch_size]
        yield make_batch(
            np.asarray(store.input_ids[chosen]).astype(np.int64),
            np.asarray(store.position_ids[chosen]).astype(np.int64),
            np.asarray(store.loss_mask[chosen]),
            device=device,
        )


def make_batch(
    input_ids: npt.NDArray[np.int64],
    position_ids: npt.NDArray[np.int64],
    loss_mask: npt.NDArray[np.bool_],
    *,
    device: torch.device,
) -> MicroBatch:
    """Build a micro-batch from arrays of shape (rows, seq_len). A masked token i is predicted at position i - 1."""
    flat_targets = np.flatnonzero(loss_mask)
    assert not loss_mask[:, 0].any(), (
        "the first token of a row has no predecessor to be predicted from"
    )
    bounds, longest = document_bounds(torch.from_numpy(position_ids))

    def put(array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        input_ids=put(input_ids),
        position_ids=put(position_ids),
        positions=put(flat_targets - 1),
        targets=put(input_ids.reshape(-1)[flat_targets]),
        bounds=(bounds.to(device), longest),
    )
