"""The seam between the output head and what is trained.

The head makes gradients while it makes log-probabilities, chunk by chunk, so a slope that is known
before costs nothing: `summed_loss`. Slopes that follow from the log-probabilities themselves
(preferences: of the sums over documents) come in backward: `log_probs`. Then a head that is trained
whole computes its chunks twice, since the gradient of its weight is a sum over all tokens.
"""

from typing import Any, Protocol

import numpy.typing as npt
import torch


class Head(Protocol):
    """The output head: trained tokens by the hidden states that predict them."""

    def summed_loss(
        self, states: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Return sum(w (-log p)) () fp32. states: (n, hidden_size); targets: (n,) int64; weights:
        (n,) fp32, None = 1."""

    def log_probs(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return log p (n,) fp32 of each target; 0 of one that only pads."""


class TokensOfBatch(Protocol):
    """What an objective reads of a micro-batch (`model.micro_batch.MicroBatch`)."""

    @property
    def positions(self) -> torch.Tensor:
        """(n,) of the states that predict trained tokens."""

    @property
    def targets(self) -> torch.Tensor:
        """(n,) trained tokens."""

    @property
    def weights(self) -> torch.Tensor | None:
        """(n,) fp32 of trained tokens; None = 1."""

    @property
    def bounds(self) -> tuple[torch.Tensor, int]:
        """(documents + 1,) positions at which documents begin, and the end."""


class TokensOfRows(Protocol):
    """What an objective reads of training rows (`data.tokens.token_store.TokenStore`)."""

    @property
    def weights_per_row(self) -> npt.NDArray[Any]:
        """(rows,), the sum over trained tokens."""


class Objective(Protocol):
    """The loss of a step = the sum of `loss` over its micro-batches, divided by the sum of `sizes`
    over its rows."""

    def loss(self, head: Head, states: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
        """Return the summed loss () fp32 of a micro-batch; states: (n, hidden_size)."""

    def size(self, batch: TokensOfBatch) -> torch.Tensor | int:
        """Return what the loss of a micro-batch is divided by, if it stands alone."""

    def sizes(self, rows: TokensOfRows) -> npt.NDArray[Any]:
        """Return the same of each row (rows,), before anything has run."""


def document_sums(log_probs: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
    """Return the sum (documents,) of log p over each document's trained tokens, in their order on
    every device; 0 of a document that only pads."""
    bounds, _ = batch.bounds
    document = torch.searchsorted(bounds, batch.positions, right=True) - 1
    sums = log_probs.new_zeros(len(bounds) - 1)
    # atomic additions would come in any order: index_put_ sorts first on a GPU
    return sums.index_put((document,), log_probs, accumulate=True)
