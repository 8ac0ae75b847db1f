"""Every loss of pairs by its formula, in float64 and by probabilities, and its gradients."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from workflow.lib.artifacts.training_record import Step
from workflow.lib.objectives.from_settings import objective_of
from workflow.lib.objectives.pairs import Answers, Pairs
from workflow.lib.settings.objectives import (
    DistillConfig,
    GrpoConfig,
    ObjectiveName,
    PairLoss,
    PreferencesConfig,
)

PAIRS = 40
Formula = Callable[..., torch.Tensor]


def s(x):
    return 1 / (1 + torch.exp(-x))


def exo(b, e, c, r):
    policy = torch.stack([s(b * (c - r)), s(b * (r - c))])
    label = torch.tensor([1 - e, e]).double()[:, None]
    return (policy * (policy / label).log()).sum(dim=0)


def discopop(b, e, c, r):
    x = b * (c - r)
    share = s(x / 0.05)
    return (1 - share) * (1 + torch.exp(-x)).log() + share * torch.exp(-x)


def smoothed(x, e):
    return -(1 - e) * s(x).log() - e * s(-x).log()


# b: beta; e: label smoothing; c, r: log-ratios of chosen and rejected
FORMULAS = {
    "sigmoid": lambda b, e, c, r: smoothed(b * (c - r), e),
    "sigmoid_norm": lambda b, e, c, r: smoothed(b * (c - r), 0),
    "hinge": lambda b, e, c, r: torch.maximum(1 - b * (c - r), torch.zeros_like(c)),
    "robust": lambda b, e, c, r: (
        (-(1 - e) * s(b * (c - r)).log() + e * s(b * (r - c)).log()) / (1 - 2 * e)
    ),
    "exo_pair": exo,
    "nca_pair": lambda b, e, c, r: -s(b * c).log() - (s(-b * c).log() + s(-b * r).log()) / 2,
    "bco_pair": lambda b, e, c, r: -s(b * c).log() - s(-b * r).log(),
    "sppo_hard": lambda b, e, c, r: (c - 1 / (2 * b)) ** 2 + (r + 1 / (2 * b)) ** 2,
    "apo_zero": lambda b, e, c, r: 1 - s(b * c) + s(b * r),
    "apo_down": lambda b, e, c, r: s(b * c) + 1 - s(b * (c - r)),
    "discopop": discopop,
}
SMOOTHING = {"sigmoid": 0.15, "robust": 0.2, "exo_pair": 0.05}


def sides(*, dtype):
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        tokens = torch.randint(1, 30, (PAIRS,), generator=draw).to(dtype)
        mean = -0.02 - 4 * torch.rand(PAIRS, generator=draw, dtype=torch.float64)
        away = torch.randn(PAIRS, generator=draw, dtype=torch.float64)
        log_p = (mean * tokens).float().to(dtype)
        reference = (mean * tokens + 3 * away).float().to(dtype)
        found.append(Answers(log_p.requires_grad_(), reference, tokens))
    return found


def compare(objective, formula):
    assert isinstance(objective, Pairs)
    ours, exact = sides(dtype=torch.float32), sides(dtype=torch.float64)
    losses, expected = objective.losses(*ours), formula(*exact)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-4, atol=1e-5)
    losses.sum().backward()
    expected.sum().backward()
    for own, theirs in zip(ours, exact, strict=True):
        largest = float(theirs.log_p.grad.abs().max())
        torch.testing.assert_close(
            own.log_p.grad.double(), theirs.log_p.grad, rtol=1e-3, atol=1e-5 * largest
        )


def given(**preferences):
    return PreferencesConfig(**preferences)


@pytest.mark.parametrize("loss_type", get_args(PairLoss))
def test_losses_of_dpo_are_those_of_their_formulas(loss_type):
    e, per_token = SMOOTHING.get(loss_type, 0.0), loss_type == "sigmoid_norm"
    settings = given(loss_type=loss_type, beta=0.4, label_smoothing=e)

    def formula(chosen, rejected):
        ratios = [
            (x.log_p - x.reference) / (x.tokens if per_token else 1) for x in (chosen, rejected)
        ]
        return FORMULAS[loss_type](0.4, e, *ratios)

    compare(objective_of("dpo", settings, DistillConfig(), GrpoConfig()), formula)


def test_loss_of_ipo_is_the_square_of_mean_log_ratios_and_half_of_the_inverse_of_beta():
    compare(
        objective_of("ipo", given(beta=0.3), DistillConfig(), GrpoConfig()),
        lambda c, r: (
            ((c.log_p - c.reference) / c.tokens - (r.log_p - r.reference) / r.tokens - 1 / 0.6) ** 2
        ),
    )


def test_loss_of_simpo_has_the_published_beta_where_none_is_given():
    settings = given(gamma=0.8, label_smoothing=0.1)
    compare(
        objective_of("simpo", settings, DistillConfig(), GrpoConfig()),
        lambda c, r: smoothed(2.0 * (c.log_p / c.tokens - r.log_p / r.tokens) - 0.8, 0.1),
    )


def test_loss_of_orpo_is_the_logistic_loss_of_log_odds_ratios():
    def log_odds(answer):
        p = (answer.log_p / answer.tokens).exp()
        return (p / (1 - p)).log()

    compare(
        objective_of("orpo", given(), DistillConfig(), GrpoConfig()),
        lambda c, r: -0.1 * s(log_odds(c) - log_odds(r)).log(),
    )


def test_log_odds_of_answers_that_are_almost_certain_are_finite():
    tokens = torch.ones(2)
    sure = Answers(torch.tensor([-1e-7, -60.0], requires_grad=True), None, tokens)
    unsure = Answers(torch.tensor([-math.log(2.0), -1e-7]), None, tokens)
    objective = objective_of("orpo", given(), DistillConfig(), GrpoConfig())
    assert isinstance(objective, Pairs)
    objective.losses(sure, unsure).sum().backward()
    assert sure.log_p.grad.isfinite().all()


EXTREMES = torch.tensor([-1e4, -1e3, -95.0, 0.0, 95.0, 1e3, 1e4])


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize(
    ("name", "loss_type"),
    [*(("dpo", form) for form in get_args(PairLoss)), ("ipo", "sigmoid"), ("simpo", "sigmoid")],
)
def test_losses_of_pairs_and_their_gradients_are_finite_at_ten_thousand_nats(name, loss_type, beta):
    e = SMOOTHING.get(loss_type, 0.0)
    settings = given(loss_type=loss_type, beta=beta, label_smoothing=e)
    objective = objective_of(name, settings, DistillConfig(), GrpoConfig())
    c, r = (x.flatten() for x in torch.meshgrid(EXTREMES, EXTREMES, indexing="ij"))
    chosen, rejected = (
        Answers(x.requires_grad_(), torch.zeros_like(x), torch.ones_like(x)) for x in (c, r)
    )
    losses = objective.losses(chosen, rejected)
    losses.sum().backward()
    assert torch.cat([losses, c.grad, r.grad]).isfinite().all()


def test_log_odds_of_answers_of_probability_1_are_finite_and_keep_their_direction():
    """A one-token answer whose logit is 20 above the others has log p of exactly 0 in fp32."""
    p = torch.tensor([0.0, -3.0, 0.0, 0.0])
    chosen, rejected = (
        Answers(x.clone().requires_grad_(), None, torch.ones(4)) for x in (p, p.flip(0))
    )
    objective = objective_of("orpo", given(), DistillConfig(), GrpoConfig())
    losses = objective.losses(chosen, rejected)
    losses.sum().backward()
    assert torch.cat([losses, chosen.log_p.grad, rejected.log_p.grad]).isfinite().all()
    assert (chosen.log_p.grad < 0).all()
    assert (rejected.log_p.grad > 0).all()


@pytest.mark.parametrize(
    ("name", "flat"), [("sft", False), ("distill", True), ("dpo", True), ("kto", True)]
)
def test_objective_says_whether_a_healthy_gradient_may_be_zero(name, flat):
    assert objective_of(name, given(), DistillConfig(), GrpoConfig()).flat is flat


def test_what_objectives_tell_of_a_step_is_declared():
    for name in get_args(ObjectiveName):
        objective = objective_of(name, given(), DistillConfig(), GrpoConfig())
        assert {figure.name for figure in objective.figures} <= set(Step.model_fields), name
