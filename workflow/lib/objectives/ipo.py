"""Identity preference optimization (arXiv 2310.12036, eq. 17), TRL's loss_type `ipo`: log-ratios
are means over the answers' tokens, as its authors confirmed to TRL."""

import torch

from workflow.lib.objectives.pairs import Answers, PairLosses


def ipo_losses(*, tau: float) -> PairLosses:
    """Return (c - r - 1 / (2 tau))^2 of the mean log-ratios c and r."""

    def losses(chosen: Answers, rejected: Answers) -> torch.Tensor:
        margin = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
        return (margin - 1 / (2 * tau)).square()

    return losses
