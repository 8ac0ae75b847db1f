"""Tokens to score, in rows as training packs them, and scores of a model's logits.

A row is what goes through a model at once: neighbouring packed rows or documents, each without what
follows its last trained token (nothing sees it), one behind the other. Positions begin again with
each document, which is all that keeps documents apart, as in training."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from workflow.lib.data.tokens.token_store import Array, TokenStore
from workflow.lib.kernels.attention.packed import FLATTENED
from workflow.lib.scores.store import Scores
from workflow.lib.scores.writer import Part

CHUNK_TOKENS = 1024  # whose logits are in fp32 at a time: 0.5 GiB at a 128k vocabulary
FLAT_TOKENS = 8192  # of a row where attention takes documents one by one, whatever their number


class Row(NamedTuple):
    """One row of n tokens with t trained ones, in host memory."""

    input_ids: torch.Tensor  # (1, n) int64
    position_ids: torch.Tensor  # (1, n) int64, 0 where a document begins
    trained: torch.Tensor
    """(t,) int64, places of the trained tokens, each predicted one place before"""


class Scorer(Protocol):
    """A model that scores. worked: told the share of its rows' work that is done."""

    attention: str

    def scores(self, rows: Sequence[Row], worked: Callable[[float], None]) -> Scores:
        """Return the scores of the trained tokens of at least one row, in order. Collective."""


def rows_of(tokens: TokenStore, part: Part, *, attention: str) -> list[Row]:
    """Return the rows of a part of the tokens; none if nothing of it is trained."""
    longest = max(tokens.seq_len, FLAT_TOKENS if attention in FLATTENED else 0)
    return list(_joined(_items(tokens, part), longest=longest))


Item = tuple[Array, Array, Array]  # ids, positions and mask of a packed row or a document


def _items(tokens: TokenStore, part: Part) -> Iterator[Item]:
    for number in range(part.first, part.first + part.count):
        if part.split == "train":
            arrays = (tokens.input_ids, tokens.position_ids, tokens.loss_mask)
            ids, positions, mask = (np.asarray(array[number]) for array in arrays)
        else:
            ids, mask = tokens.heldout_documents()[number]
            positions = np.arange(len(ids))
        if mask.any():
            end = int(np.flatnonzero(mask)[-1]) + 1
            yield ids[:end], positions[:end], mask[:end]


def _joined(items: Iterable[Item], *, longest: int) -> Iterator[Row]:
    row: list[Item] = []
    for item in items:
        if row and sum(len(ids) for ids, *_ in [*row, item]) > longest:
            yield _row(row)
            row = []
        row.append(item)
    if row:
        yield _row(row)


def _row(items: Sequence[Item]) -> Row:
    ids, positions, mask = (
        torch.from_numpy(np.concatenate(arrays).astype(np.int64))
        for arrays in zip(*items, strict=True)
    )
    return Row(ids[None], positions[None], mask.nonzero().flatten())


@torch.no_grad()
def scores_of(
    logits: torch.Tensor, targets: torch.Tensor, *, top_k: int, vocabulary: int
) -> Scores:
    """Return the scores of targets (n,) by logits (n, vocabulary or more), in fp32 by chunks. A
    teacher's logits beyond the vocabulary have their share in `rest`."""
    parts = [
        _chunk_scores(some.float(), wanted, top_k, vocabulary)
        for some, wanted in zip(
            logits.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True
        )
    ]
    return Scores.joined(parts)


def _chunk_scores(
    logits: torch.Tensor, targets: torch.Tensor, top_k: int, vocabulary: int
) -> Scores:
    log_probs = logits.log_softmax(-1)
    of_targets = log_probs.gather(1, targets[:, None])[:, 0].cpu().numpy()
    if not top_k:
        return Scores(of_targets)
    top, ids = log_probs[:, :vocabulary].topk(top_k)
    # the mass of the others is summed: 1 less that of the likeliest would be lost in rounding
    rest = log_probs.scatter(1, ids, float("-inf")).logsumexp(-1)
    return Scores(
        of_targets, ids.cpu().numpy().astype(np.uint32), top.cpu().numpy(), rest.cpu().numpy()
    )
