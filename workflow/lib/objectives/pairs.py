"""Training on pairs: a loss of each pair from the sums of log p over its chosen and its rejected
answer, and where there is a reference from those of the reference.

The loss of a step is the mean over its pairs, plus `sft_weight` times the mean of -log p over the
tokens of its chosen answers (TRL's loss_type `sft`). Rewards are beta (log p - log p_ref), by TRL's
definition, or what an objective without a reference calls so."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.objectives.objective import (
    Figure,
    Head,
    TokensOfBatch,
    TokensOfRows,
    document_sums,
)


@dataclass(frozen=True)
class Answers:
    """Of one side of all pairs (pairs,) fp32: sums of log p over the answer's tokens, by the model
    and by the reference, and how many these are."""

    log_p: torch.Tensor
    reference: torch.Tensor | None
    tokens: torch.Tensor

    @cached_property
    def ratio(self) -> torch.Tensor:
        """log p - log p_ref"""
        assert self.reference is not None, "the objective has no reference"
        return self.log_p - self.reference

    @cached_property
    def mean(self) -> torch.Tensor:
        """log p of a token"""
        return self.log_p / self.tokens


PairLosses = Callable[[Answers, Answers], torch.Tensor]
Rewards = Callable[[Answers], torch.Tensor]


def answers(log_probs: torch.Tensor, batch: TokensOfBatch) -> tuple[Answers, Answers]:
    """Return each example's first and second document, from log p (n,) of trained tokens."""
    assert batch.firsts is not None, "the tokens hold examples of two documents"
    every = [log_probs, batch.reference, torch.ones_like(log_probs)]
    sums = [None if x is None else document_sums(x, batch) for x in every]
    first, second = (
        [None if of is None else of[batch.firsts + place] for of in sums] for place in (0, 1)
    )
    return Answers(*first), Answers(*second)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pairs:
    """An objective on pairs. losses: (pairs,) of chosen and rejected; rewards: of answers."""

    losses: PairLosses
    rewards: Rewards
    sft_weight: float = 0.0

    figures = tuple(
        map(
            Figure,
            (
                "reward_chosen",
                "reward_rejected",
                "reward_margin",
                "reward_accuracy",
                "log_probs_chosen",
                "log_probs_rejected",
            ),
        )
    )

    estimated = None

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over pairs, with the supervised term by as much as it has of the step."""
        chosen, rejected = answers(head.log_probs(states, batch.targets), batch)
        loss = self.losses(chosen, rejected).sum()
        if self.sft_weight:
            assert batch.step_sizes is not None
            pairs_per_token = batch.step_sizes[0] / batch.step_sizes[1]
            loss = loss - self.sft_weight * pairs_per_token * chosen.log_p.sum()
        return loss, self._figures(chosen, rejected)

    @torch.no_grad()
    def _figures(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        good, bad = self.rewards(chosen), self.rewards(rejected)
        every = (good, bad, good - bad, (good > bad).float(), chosen.log_p, rejected.log_p)
        return torch.stack([of.sum() for of in every])

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return the pairs of a step, and the trained tokens of its chosen answers."""
        positions, trained = rows.position_ids[indices], rows.loss_mask[indices]
        number = (positions == 0).cumsum(axis=1)  # of the document in its row, from 1
        pairs = int((number[:, -1] // 2).sum())
        return float(pairs), float((trained & (number % 2 == 1)).sum())


def reward_by_reference(beta: float) -> Rewards:
    """Return beta (log p - log p_ref)."""
    return lambda answer: beta * answer.ratio
