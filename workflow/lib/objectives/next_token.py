"""Losses of single tokens, each by its weight: supervised training, and distillation."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.objectives.objective import (
    DocumentSums,
    Figure,
    Head,
    Objective,
    Teacher,
    TokensOfBatch,
    TokensOfRows,
)


class NextToken:
    """A step's loss is sum(w (-log p)) / sum(w) over trained tokens; w is 1 without weights."""

    figures: tuple[Figure, ...] = ()
    estimated = None
    dropout = True

    def may_stand_still(self, sizes: tuple[float, ...]) -> bool:
        """Return whether all of the step's tokens have a weight of 0."""
        return sizes[0] == 0

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return sum(w (-log p)) () fp32."""
        return head.summed_loss(states, batch.targets, batch.weights), None

    def token_losses(self, head: Head, states: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
        """Return -log p."""
        return -head.log_probs(states, batch.targets)

    def example_losses(self, documents: DocumentSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of each document."""
        return documents.loss, documents.weight

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return sum(w)."""
        return (float(rows.weights_per_row[indices].sum()),)


NEXT_TOKEN = NextToken()


@dataclass(frozen=True)
class TokenLosses(NextToken):
    """No loss; its figures are the losses (n,) of each trained token by another objective."""

    objective: Objective

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        losses = self.objective.token_losses(head, states, batch)
        return losses.new_zeros(()), losses


@dataclass(frozen=True)
class Distill:
    """The student learns a teacher's distribution of each trained token (Hinton et al., arXiv
    1503.02531, with forward KL to the teacher's likeliest tokens and all others as one outcome).

    The loss of a step is sum(w (T^2 KL + sft_weight (-log p))) / sum(w) over trained tokens. T^2
    keeps the size of gradients, as published. With k as large as the vocabulary it is the usual
    distillation."""

    temperature: float
    sft_weight: float

    figures = (Figure("teacher_kl"), Figure("sft_loss"))
    estimated = None
    dropout = True

    def may_stand_still(self, sizes: tuple[float, ...]) -> bool:
        """Return True: a student may equal its teacher."""
        return True

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return head.distilled_loss(states, batch.targets, batch.weights, self._teacher(batch))

    def token_losses(self, head: Head, states: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
        """Return T^2 KL + sft_weight (-log p)."""
        return head.distilled_losses(states, batch.targets, self._teacher(batch))

    def _teacher(self, batch: TokensOfBatch) -> Teacher:
        ids, log_probs = batch.teacher_ids, batch.teacher_log_probs
        assert ids is not None, "the tokens have a teacher's scores"
        assert log_probs is not None
        return Teacher(ids, log_probs, self.temperature, self.sft_weight)

    def example_losses(self, documents: DocumentSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of each document."""
        return NEXT_TOKEN.example_losses(documents)

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return sum(w)."""
        return NEXT_TOKEN.step_sizes(rows, indices)
