"""The objective of the settings."""

from functools import partial

from workflow.lib.objectives.grpo import Grpo
from workflow.lib.objectives.objective import NEXT_TOKEN, Distill, Objective
from workflow.lib.objectives.pairs import (
    PairLosses,
    Pairs,
    RatedAnswers,
    dpo,
    ipo,
    orpo,
    reward_by_reference,
    simpo,
)
from workflow.lib.settings.objectives import (
    DistillConfig,
    GrpoConfig,
    ObjectiveName,
    PreferencesConfig,
)

BETA = 0.1
SIMPO_BETA = 2.0  # arXiv 2405.14734, section 3


def objective_of(
    name: ObjectiveName,
    preferences: PreferencesConfig,
    distill: DistillConfig,
    grpo: GrpoConfig,
) -> Objective:
    """Return the objective of the settings; without `preferences.beta` it is 0.1, SimPO's 2."""
    beta = preferences.beta or (SIMPO_BETA if name == "simpo" else BETA)
    smoothing = preferences.label_smoothing
    match name:
        case "sft":
            return NEXT_TOKEN
        case "dpo":
            losses: PairLosses = partial(
                dpo, loss_type=preferences.loss_type, beta=beta, label_smoothing=smoothing
            )
            return Pairs(losses, reward_by_reference(beta), preferences.sft_weight)
        case "ipo":
            return Pairs(partial(ipo, tau=beta), reward_by_reference(beta), preferences.sft_weight)
        case "simpo":
            losses = partial(simpo, beta=beta, gamma=preferences.gamma, label_smoothing=smoothing)
            return Pairs(losses, lambda answer: beta * answer.mean, preferences.sft_weight)
        case "orpo":
            losses = partial(orpo, beta=beta)
            return Pairs(losses, lambda answer: beta * answer.mean, sft_weight=1.0)
        case "kto":
            return RatedAnswers(beta, preferences.desirable_weight, preferences.undesirable_weight)
        case "distill":
            return Distill(distill.temperature, distill.sft_weight)
        case "grpo":
            return Grpo(grpo)
