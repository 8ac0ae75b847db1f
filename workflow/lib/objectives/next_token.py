"""Supervised training: the next token of what is trained, each token by its weight."""

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.objectives.objective import Figure, Head, TokensOfBatch, TokensOfRows


class NextToken:
    """A step's loss is sum(w (-log p)) / sum(w) over trained tokens; w is 1 without weights."""

    figures: tuple[Figure, ...] = ()
    estimated = None

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, None]:
        """Return sum(w (-log p)) () fp32."""
        return head.summed_loss(states, batch.targets, batch.weights), None

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return sum(w)."""
        return (float(rows.weights_per_row[indices].sum()),)


NEXT_TOKEN = NextToken()
