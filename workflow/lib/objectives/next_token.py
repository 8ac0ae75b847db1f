"""Supervised training: the next token of what is trained, each token by its weight."""

from typing import Any

import numpy.typing as npt
import torch

from workflow.lib.objectives.objective import Head, TokensOfBatch, TokensOfRows


class NextToken:
    """The loss of a step is sum(w (-log p)) / sum(w) over its trained tokens; w is 1 where the data
    have no weights."""

    def loss(self, head: Head, states: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
        """Return sum(w (-log p)) () fp32."""
        return head.summed_loss(states, batch.targets, batch.weights)

    def size(self, batch: TokensOfBatch) -> torch.Tensor | int:
        """Return sum(w)."""
        return len(batch.targets) if batch.weights is None else batch.weights.sum()

    def sizes(self, rows: TokensOfRows) -> npt.NDArray[Any]:
        """Return sum(w) of each row."""
        return rows.weights_per_row


NEXT_TOKEN = NextToken()
