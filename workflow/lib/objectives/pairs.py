"""Training on pairs: a loss of each pair from the sums of log p over its chosen and its rejected
answer, and with a reference from the reference's sums.

The loss of a step is the mean over its pairs, plus `sft_weight` times the mean of -log p over the
tokens of its chosen answers (TRL's loss_type `sft`). Rewards are beta (log p - log p_ref), by TRL's
definition, or an objective's own without a reference.

Rated answers are two documents each too: Kahneman-Tversky optimization (arXiv 2402.01306, eq. 8),
TRL's `KTOTrainer` with loss_type `kto`. v: log p - log p_ref of an answer; z: the mean of v over
answers to other prompts, at least 0 (an estimate of KL). z is of the whole step: a forward without
dropout and gradients computes it first, so that neither processes nor micro-batches change it;
TRL's is of a batch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import logsigmoid

from workflow.lib.kernels.attention.head_exchange import share
from workflow.lib.objectives.objective import (
    DocumentSums,
    Figure,
    Head,
    OfTokens,
    TokensOfBatch,
    TokensOfRows,
    document_sums,
    document_tokens,
    exact_sum,
)
from workflow.lib.settings.objectives import PairLoss


@dataclass(frozen=True)
class Answers:
    """One side of all pairs (pairs,) fp32: sums of log p over the answer's tokens, by the model and
    by the reference, and their numbers of tokens."""

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
    """Return each example's first and second document, from log p (n,) of trained tokens; of
    padding a token with log p = 0, whose losses are finite."""
    assert batch.firsts is not None, "the tokens hold examples of two documents"
    real, reference = batch.firsts >= 0, batch.reference
    log_p = document_sums(log_probs, batch)
    reference = None if reference is None else document_sums(reference, batch)
    every = [(log_p, 0.0), (reference, 0.0), (document_tokens(batch), 1.0)]
    first, second = (
        [None if x is None else x[batch.firsts + n].where(real, padding) for x, padding in every]
        for n in (0, 1)
    )
    return Answers(*first), Answers(*second)  # type: ignore[arg-type]


def example_sum(losses: torch.Tensor, batch: TokensOfBatch) -> torch.Tensor:
    """Return the sum () of the losses (examples,), without padding."""
    assert batch.firsts is not None
    return exact_sum(losses.where(batch.firsts >= 0, 0.0))


def measured_answers(documents: DocumentSums) -> tuple[Answers, Answers]:
    """Return each example's first and second document."""
    every = (documents.log_p, documents.reference, documents.tokens)
    first, second = ([None if of is None else of[offset::2] for of in every] for offset in (0, 1))
    return Answers(*first), Answers(*second)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pairs(OfTokens):
    """An objective on pairs. losses: (pairs,) of chosen and rejected; rewards: of answers."""

    losses: PairLosses
    rewards: Rewards
    sft_weight: float = 0.0

    figures = (
        *map(Figure, ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")),
        *map(Figure, ("log_probs_chosen", "log_probs_rejected")),
    )
    dropout = False
    flat = True  # losses of pairs have a flat end, as the hinge above its margin

    def loss(
        self, head: Head, states: torch.Tensor, batch: TokensOfBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over pairs, with the supervised term in proportion to the step."""
        chosen, rejected = answers(head.log_probs(states, batch.targets), batch)
        loss = example_sum(self.losses(chosen, rejected), batch)
        if self.sft_weight:
            assert batch.step_sizes is not None
            pairs_per_token = batch.step_sizes[0] / batch.step_sizes[1]
            loss = loss - self.sft_weight * pairs_per_token * exact_sum(chosen.log_p)
        return share(loss, batch.cut), share(self._figures(chosen, rejected), batch.cut)

    def example_losses(self, documents: DocumentSums) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each pair, with the supervised term in proportion to all of them."""
        chosen, rejected = measured_answers(documents)
        losses = self.losses(chosen, rejected)
        pairs_per_token = len(losses) / chosen.tokens.sum()
        losses = losses - self.sft_weight * pairs_per_token * chosen.log_p
        return losses, torch.ones_like(losses)

    @torch.no_grad()
    def _figures(self, chosen: Answers, rejected: Answers) -> torch.Tensor:
        good, bad = self.rewards(chosen), self.rewards(rejected)
        every = (good, bad, good - bad, (good > bad).float(), chosen.log_p, rejected.log_p)
        return torch.stack([exact_sum(of) for of in every])

    def step_sizes(self, rows: TokensOfRows, indices: npt.NDArray[np.int64]) -> tuple[float, ...]:
        """Return the pairs of a step, and the trained tokens of its chosen answers."""
        positions, trained = rows.position_ids[indices], rows.loss_mask[indices]
        number = (positions == 0).cumsum(axis=1)  # of the document in its row, from 1
        pairs = int((number[:, -1] // 2).sum())
        return float(pairs), float((trained & (number % 2 == 1)).sum())


def reward_by_reference(beta: float) -> Rewards:
    """Return beta (log p - log p_ref)."""
    return lambda answer: beta * answer.ratio


DISCOPOP_TAU = 0.05  # arXiv 2406.08414, as TRL has it
SURE = -(2.0**-24)  # log of the fp32 number below 1
HALF = -math.log(2.0)  # boundary between the two forms of log(1 - e^x)
# (beta, e, c, r) -> losses
Form = Callable[[float, float, torch.Tensor, torch.Tensor], torch.Tensor]


def _sigmoid(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """-log s(beta d); with label smoothing conservative DPO (arXiv 2305.18290, appendix)."""
    x = beta * (c - r)
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


def _robust(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Unbiased where labels are flipped with probability e (arXiv 2403.00409, eq. 11)."""
    x = beta * (c - r)
    return (e * logsigmoid(-x) - (1 - e) * logsigmoid(x)) / (1 - 2 * e)


def _exo_pair(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """KL of the model's preference to the smoothed label's (arXiv 2402.00856, eq. 16)."""
    chosen, rejected = logsigmoid(beta * (c - r)), logsigmoid(-beta * (c - r))
    return chosen.exp() * (chosen - math.log1p(-e)) + rejected.exp() * (rejected - math.log(e))


def _discopop(beta: float, e: float, c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Log-ratio modulated loss (arXiv 2406.08414, eq. 5)."""
    x = beta * (c - r)
    y = x / DISCOPOP_TAU
    # s(y) exp(-x) as one exponential: exp(-x) alone overflows where s(y) is 0
    return torch.sigmoid(-y) * -logsigmoid(x) + torch.exp(logsigmoid(y) - x)


FORMS: Mapping[PairLoss, Form] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "discopop": _discopop,
    # SLiC's hinge (arXiv 2305.10425) on the margin of rewards (arXiv 2309.06657)
    "hinge": lambda beta, e, c, r: (1 - beta * (c - r)).clamp(min=0),
    # noise contrastive alignment of pairs (arXiv 2402.05369)
    "nca_pair": lambda beta, e, c, r: (
        -logsigmoid(beta * c) - 0.5 * logsigmoid(-beta * c) - 0.5 * logsigmoid(-beta * r)
    ),
    # binary classifier of answers (arXiv 2404.04656), without its shift
    "bco_pair": lambda beta, e, c, r: -logsigmoid(beta * c) - logsigmoid(-beta * r),
    # self-play with preferences of 1 and 0 (arXiv 2405.00675, eq. 4.7)
    "sppo_hard": lambda beta, e, c, r: (c - 0.5 / beta).square() + (r + 0.5 / beta).square(),
    # chosen answers are better (arXiv 2408.06266, eq. 7) or worse (eq. 8) than the model's own
    "apo_zero": lambda beta, e, c, r: torch.sigmoid(-beta * c) + torch.sigmoid(beta * r),
    "apo_down": lambda beta, e, c, r: torch.sigmoid(beta * c) + torch.sigmoid(-beta * (c - r)),
}
PER_TOKEN: tuple[PairLoss, ...] = ("sigmoid_norm",)  # c and r are means over the answer's tokens


def dpo(
    chosen: Answers, rejected: Answers, *, loss_type: PairLoss, beta: float, label_smoothing: float
) -> torch.Tensor:
    """Return the losses of direct preference optimization (arXiv 2305.18290, eq. 7), and of
    relatives that are a sum over pairs, under the names of TRL's `DPOConfig.loss_type`. c, r:
    log p - log p_ref of chosen and rejected; d = c - r; e: label smoothing; s: the logistic
    function. TRL's losses that sort a batch (aot) are none of single pairs."""
    c, r = chosen.ratio, rejected.ratio
    if loss_type in PER_TOKEN:
        c, r = c / chosen.tokens, r / rejected.tokens
    return FORMS[loss_type](beta, label_smoothing, c, r)


def ipo(chosen: Answers, rejected: Answers, *, tau: float) -> torch.Tensor:
    """Return (c - r - 1 / (2 tau))^2 (identity preference optimization, arXiv 2310.12036, eq. 17).
    Log-ratios are means over the answers' tokens, as its authors confirmed to TRL."""
    margin = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
    return (margin - 1 / (2 * tau)).square()


def simpo(
    chosen: Answers, rejected: Answers, *, beta: float, gamma: float, label_smoothing: float
) -> torch.Tensor:
    """Return -log s(beta (c - r) - gamma) of mean log p, smoothed by e with the opposite (arXiv
    2405.14734, eq. 6; TRL's CPO with loss_type `simpo`). gamma: the target margin."""
    x, e = beta * (chosen.mean - rejected.mean) - gamma, label_smoothing
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


def orpo(chosen: Answers, rejected: Answers, *, beta: float) -> torch.Tensor:
    """Return -beta log s(log odds(chosen) - log odds(rejected)) of mean log p (arXiv 2403.07691,
    eq. 6 and 7; beta: the paper's lambda). The supervised loss of chosen answers is added. TRL's
    trainer and the authors' code include the prompt in that; here it is over trained tokens
    only."""
    return -beta * logsigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p)). An fp32 log p of a sure answer is 0, whose odds are infinite: it
    counts as that of the closest p, with that one's slope."""
    log_p = log_p + (log_p.detach().clamp(max=SURE) - log_p.detach())
    low = log_p < HALF
    # each form gets only its own values: the other's would give gradients that are not finite
    by_log1p = torch.log1p(-torch.exp(log_p.where(low, HALF)))
    by_expm1 = torch.log(-torch.expm1(log_p.where(~low, HALF)))
    return log_p - by_log1p.where(low, by_expm1)


def reference_point(mean: torch.Tensor) -> torch.Tensor:
    """Return z, from the mean of v over answers to other prompts."""
    return mean.clamp(min=0)


@dataclass(frozen=True)
class RatedAnswers(OfTokens):
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
    flat = True  # at both ends of the loss, and answers may weigh 0

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
