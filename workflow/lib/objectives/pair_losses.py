"""Losses (pairs,) of chosen and rejected answers.

`dpo`: direct preference optimization (arXiv 2305.18290, eq. 7) and relatives that are a sum over
pairs, under the names of TRL's `DPOConfig.loss_type`. c, r: log p - log p_ref of chosen and
rejected; d = c - r; e: label smoothing; s: the logistic function. TRL's losses that sort a batch
(aot) are none of single pairs.

`ipo`: identity preference optimization (arXiv 2310.12036, eq. 17), TRL's loss_type `ipo`:
log-ratios are means over the answers' tokens, as its authors confirmed to TRL.

`simpo` (arXiv 2405.14734, eq. 6), TRL's CPO with loss_type `simpo`: the reward is beta times the
mean log p of the answer's tokens, without a reference; gamma is the margin that is asked for.

`orpo` (arXiv 2403.07691, eq. 6 and 7): by beta (the paper's lambda), the log-odds ratio of mean
log p, without a reference; beside it stands the supervised loss of chosen answers. TRL's trainer
and the authors' code take the prompt into that; here, as everywhere, it is of what the data
train."""

import math
from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import logsigmoid

from workflow.lib.objectives.pairs import Answers
from workflow.lib.settings.objectives import PairLoss

DISCOPOP_TAU = 0.05  # arXiv 2406.08414, as TRL has it
HALF = -math.log(2.0)  # where one of the two forms of log(1 - e^x) becomes the better one
# (beta, e, c, r) -> losses
Form = Callable[[float, float, torch.Tensor, torch.Tensor], torch.Tensor]


def _sigmoid(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """-log s(beta d); with label smoothing conservative DPO (arXiv 2305.18290, appendix)."""
    x = beta * (c - r)
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


def _hinge(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """SLiC's hinge (arXiv 2305.10425) on the margin of rewards (arXiv 2309.06657)."""
    return (1 - beta * (c - r)).clamp(min=0)


def _robust(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Unbiased where labels are flipped with probability e (arXiv 2403.00409, eq. 11)."""
    x = beta * (c - r)
    return (e * logsigmoid(-x) - (1 - e) * logsigmoid(x)) / (1 - 2 * e)


def _exo_pair(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """KL of the model's preference to the smoothed label's (arXiv 2402.00856, eq. 16)."""
    chosen, rejected = logsigmoid(beta * (c - r)), logsigmoid(-beta * (c - r))
    return chosen.exp() * (chosen - math.log1p(-e)) + rejected.exp() * (rejected - math.log(e))


def _nca_pair(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Noise contrastive alignment of pairs (arXiv 2402.05369)."""
    return -logsigmoid(beta * c) - 0.5 * logsigmoid(-beta * c) - 0.5 * logsigmoid(-beta * r)


def _bco_pair(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Binary classifier of answers (arXiv 2404.04656), without its shift."""
    return -logsigmoid(beta * c) - logsigmoid(-beta * r)


def _sppo_hard(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Self-play with preferences of 1 and 0 (arXiv 2405.00675, eq. 4.7)."""
    return (c - 0.5 / beta).square() + (r + 0.5 / beta).square()


def _apo_zero(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Chosen answers are better than the model's own (arXiv 2408.06266, eq. 7)."""
    return torch.sigmoid(-beta * c) + torch.sigmoid(beta * r)


def _apo_down(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Chosen answers are worse than the model's own (arXiv 2408.06266, eq. 8)."""
    return torch.sigmoid(beta * c) + torch.sigmoid(-beta * (c - r))


def _discopop(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Log-ratio modulated loss (arXiv 2406.08414, eq. 5)."""
    x = beta * (c - r)
    share = torch.sigmoid(x / DISCOPOP_TAU)
    return (1 - share) * -logsigmoid(x) + share * torch.exp(-x)


FORMS: Mapping[PairLoss, Form] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "hinge": _hinge,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}
PER_TOKEN: tuple[PairLoss, ...] = ("sigmoid_norm",)  # c and r are means over the answer's tokens


def dpo(
    chosen: Answers, rejected: Answers, *, loss_type: PairLoss, beta: float, label_smoothing: float
) -> torch.Tensor:
    c, r = chosen.ratio, rejected.ratio
    if loss_type in PER_TOKEN:
        c, r = c / chosen.tokens, r / rejected.tokens
    return FORMS[loss_type](beta, label_smoothing, c, r)


def ipo(chosen: Answers, rejected: Answers, *, tau: float) -> torch.Tensor:
    """Return (c - r - 1 / (2 tau))^2 of the mean log-ratios c and r."""
    margin = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
    return (margin - 1 / (2 * tau)).square()


def simpo(
    chosen: Answers, rejected: Answers, *, beta: float, gamma: float, label_smoothing: float
) -> torch.Tensor:
    """Return -log s(beta (c - r) - gamma) of mean log p, smoothed by e with the opposite."""
    x, e = beta * (chosen.mean - rejected.mean) - gamma, label_smoothing
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


def orpo(chosen: Answers, rejected: Answers, *, beta: float) -> torch.Tensor:
    """Return -beta log s(log odds(chosen) - log odds(rejected))."""
    return -beta * logsigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    low = log_p < HALF
    # each form sees values of its own alone: the other's would give gradients that are not finite
    by_log1p = torch.log1p(-torch.exp(log_p.where(low, HALF)))
    by_expm1 = torch.log(-torch.expm1(log_p.where(~low, HALF)))
    return log_p - by_log1p.where(low, by_expm1)
