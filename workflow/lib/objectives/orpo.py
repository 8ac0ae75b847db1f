"""ORPO (arXiv 2403.07691, eq. 6 and 7): the supervised loss of chosen answers and, by beta (the
paper's lambda), the log-odds ratio of mean log p. No reference.

TRL's trainer and the authors' code take the prompt into the supervised loss; here, as everywhere,
it is of what the data train."""

import math

import torch
from torch.nn.functional import logsigmoid

from workflow.lib.objectives.pairs import Answers, PairLosses

HALF = -math.log(2.0)  # where one of the two forms of log(1 - e^x) becomes the better one


def orpo_losses(*, beta: float) -> PairLosses:
    """Return -beta log s(log odds(chosen) - log odds(rejected))."""

    def losses(chosen: Answers, rejected: Answers) -> torch.Tensor:
        return -beta * logsigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))

    return losses


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    low = log_p < HALF
    # each form sees values of its own alone: the other's would give gradients that are not finite
    by_log1p = torch.log1p(-torch.exp(log_p.where(low, HALF)))
    by_expm1 = torch.log(-torch.expm1(log_p.where(~low, HALF)))
    return log_p - by_log1p.where(low, by_expm1)
