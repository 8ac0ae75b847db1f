"""Losses of single tokens, each by its weight: supervised training, and distillation."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.objectives.objective import Figure, Head, Teacher, TokensOfBatch, TokensOfRows


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
    ) -> tuple[torch.Tensor, None]:
        """Return sum(w (-log p)) () fp32."""
        return head.summed_loss(states, batch.targets, batch.weights), None

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return sum(w)."""
        return (float(rows.weights_per_row[indices].sum()),)


NEXT_TOKEN = NextToken()


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
        ids, log_probs = batch.teacher_ids, batch.teacher_log_probs
        assert ids is not None, "the tokens have a teacher's scores"
        assert log_probs is not None
        teacher = Teacher(ids, log_probs, self.temperature, self.sft_weight)
        return head.distilled_loss(states, batch.targets, batch.weights, teacher)

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return sum(w)."""
        return NEXT_TOKEN.step_sizes(rows, indices)
