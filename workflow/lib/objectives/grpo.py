"""Group relative policy optimization (arXiv 2402.03300, eq. 3) and relatives, as TRL's
`GRPOTrainer` has them: answers of the model itself, each with an advantage.

Of a trained token, r: p / p_old, where old is the start of the training; A: its answer's advantage;
w: min(p_old / p_sampled, cap), the truncated weight for a sampler that computes otherwise than the
trainer (TRL's `token_truncate`); q: p_ref / p, of the reference of KL. Its loss is
-w min(r A, clip(r, 1 - low, 1 + high) A) + kl r (q - log q - 1); a high above low is DAPO's (arXiv
2503.14476, eq. 10). The last term is an unbiased estimate of KL, as its gradient is (arXiv
2512.02556; TRL's `use_bias_correction_kl`)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workflow.lib.kernels.loss.fused_logits import IGNORED
from workflow.lib.objectives.objective import (
    Figure,
    Head,
    NextToken,
    TokensOfBatch,
    TokensOfRows,
    document_numbers,
    document_tokens,
    exact_sum,
)
from workflow.lib.settings.objectives import GrpoConfig


@dataclass(frozen=True)
class Grpo(NextToken):
    """The loss of a step is the sum over tokens by the trained tokens (`token`), the mean over
    answers of the means over their tokens (`answer`), or the sum by `constant` times the answers
    (Dr. GRPO, arXiv 2503.20783). Held-out texts have the loss of `NextToken`."""

    settings: GrpoConfig

    figures = (
        Figure("clipped", per=1),
        Figure("reference_kl", per=1),
        Figure("ratio", per=1),
        Figure("entropy", per=1),
        Figure("importance", per=1),
    )
    dropout = False
    flat = True  # advantages may all be 0

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over tokens or answers."""
        settings, log_p = self.settings, head.log_probs(states, batch.targets)
        old, advantages, sampled = batch.reference, batch.advantages, batch.sampled_log_probs
        assert old is not None, "the start of the training is the reference"
        assert advantages is not None, "the tokens hold rewarded answers"
        assert sampled is not None
        ratio = torch.exp(log_p - old)
        bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        losses = -torch.minimum(ratio * advantages, bounded * advantages)
        weight = torch.exp(old - sampled)
        if settings.importance_cap is not None:
            weight = weight.clamp(max=settings.importance_cap)
            losses = weight * losses
        difference = (old if batch.scored is None else batch.scored) - log_p
        divergence = ratio * (torch.exp(difference) - difference - 1)
        if settings.kl:
            losses = losses + settings.kl * divergence
        with torch.no_grad():
            low = (ratio < 1 - settings.clip_low) & (advantages < 0)
            clipped = low | ((ratio > 1 + settings.clip_high) & (advantages > 0))
            every = (clipped.float(), divergence, ratio, -log_p, weight)
            trained = batch.targets != IGNORED
            figures = torch.stack([exact_sum(values.where(trained, 0.0)) for values in every])
        if settings.normalize == "answer":
            tokens = document_tokens(batch).clamp(min=1)  # padding may be of one without any
            losses = losses / tokens[document_numbers(batch)]
        return exact_sum(losses), figures

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return the divisor of a step's loss, and its trained tokens."""
        trained = rows.loss_mask[indices]
        tokens, normalize = float(trained.sum()), self.settings.normalize
        if normalize == "token":
            return tokens, tokens
        numbers = (rows.position_ids[indices] == 0).ravel().cumsum()  # of each token's document
        answers = float(len(np.unique(numbers[trained.ravel()])))
        return answers * (self.settings.constant if normalize == "constant" else 1), tokens
