"""Kahneman-Tversky optimization of rated answers (arXiv 2402.01306, eq. 8), TRL's `KTOTrainer` with
loss_type `kto`.

v: log p - log p_ref of an answer; z: the mean of v over answers to other prompts, at least 0 (an
estimate of KL). z is of the whole step: a forward without dropout and gradients computes it first,
so that neither processes nor micro-batches change it; TRL's is of a batch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.kernels.attention.row_cut import share
from workflow.lib.objectives.next_token import NEXT_TOKEN
from workflow.lib.objectives.objective import (
    DocumentSums,
    Figure,
    Head,
    TokensOfBatch,
    TokensOfRows,
    exact_sum,
)
from workflow.lib.objectives.pairs import (
    Rewards,
    answers,
    example_sum,
    measured_answers,
    reward_by_reference,
)


def reference_point(mean: torch.Tensor) -> torch.Tensor:
    """Return z, from the mean of v over answers to other prompts."""
    return mean.clamp(min=0)


@dataclass(frozen=True)
class RatedAnswers:
    """The loss of a step is the mean over its answers of w_d (1 - s(beta (v - z))) for desirable
    and w_u (1 - s(beta (z - v))) for undesirable ones."""

    beta: float
    desirable_weight: float
    undesirable_weight: float

    figures = (
        Figure("reward_desirable", per=1),
        Figure("reward_undesirable", per=2),
        Figure("log_probs_desirable", per=1),
        Figure("log_probs_undesirable", per=2),
        Figure("kl"),
    )
    estimated = len(figures) - 1
    dropout = False

    def may_stand_still(self, sizes: tuple[float, ...]) -> bool:
        """Return True: both ends of the loss are flat, and answers may weigh 0."""
        return True

    @property
    def rewards(self) -> Rewards:
        return reward_by_reference(self.beta)

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over answers; z is 0 before its estimate."""
        answer, mismatched = answers(head.log_probs(states, batch.targets), batch)
        good, v = batch.desirable, answer.ratio
        assert good is not None, "the tokens hold rated answers"
        z = v.new_zeros(()) if batch.estimate is None else reference_point(batch.estimate)
        with torch.no_grad():
            every = (self.beta * v, answer.log_p)
            sums_by_kind = [exact_sum(x.where(kind, 0.0)) for x in every for kind in (good, ~good)]
            figures = torch.stack([*sums_by_kind, exact_sum(mismatched.ratio)])
        loss = example_sum(self._losses(v, good, z), batch)
        return share(loss, batch.cut), share(figures, batch.cut)

    def _losses(self, v: torch.Tensor, good: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the loss of each answer."""
        lost = torch.where(
            good, torch.sigmoid(self.beta * (z - v)), torch.sigmoid(self.beta * (v - z))
        )
        return torch.where(good, self.desirable_weight, self.undesirable_weight) * lost

    def token_losses(self, head: Head, states: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
        """Return -log p."""
        return NEXT_TOKEN.token_losses(head, states, batch)

    def example_losses(self, documents: DocumentSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each answer; z is of all of them."""
        assert documents.desirable is not None, "the documents are rated answers"
        answer, mismatched = measured_answers(documents)
        z = reference_point(mismatched.ratio.mean())
        losses = self._losses(answer.ratio, documents.desirable[::2], z)
        return losses, torch.ones_like(losses)

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return the answers of a step, the desirable and the undesirable ones."""
        assert rows.desirable is not None, "the tokens hold rated answers"
        begins = rows.position_ids[indices] == 0
        first = begins & (begins.cumsum(axis=1) % 2 == 1)
        first &= begins.cumsum(axis=1) < begins.sum(axis=1, keepdims=True)  # not of a row's padding
        desirable = int(rows.desirable[indices][first].sum())
        return float(first.sum()), float(desirable), float(first.sum() - desirable)
