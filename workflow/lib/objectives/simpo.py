"""SimPO (arXiv 2405.14734, eq. 6), TRL's CPO with loss_type `simpo`: the reward is beta times the
mean log p of the answer's tokens, without a reference; gamma is the margin that is asked for."""

import torch
from torch.nn.functional import logsigmoid

from workflow.lib.objectives.pairs import Answers, PairLosses


def simpo_losses(*, beta: float, gamma: float, label_smoothing: float) -> PairLosses:
    """Return -log s(beta (c - r) - gamma) of mean log p, smoothed by e with the opposite."""

    def losses(chosen: Answers, rejected: Answers) -> torch.Tensor:
        x, e = beta * (chosen.mean - rejected.mean) - gamma, label_smoothing
        return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)

    return losses
