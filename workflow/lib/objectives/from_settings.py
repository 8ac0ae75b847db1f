"""The objective that settings name."""

from collections.abc import Callable, Mapping

from workflow.lib.objectives.distill import Distill
from workflow.lib.objectives.dpo import dpo_losses
from workflow.lib.objectives.ipo import ipo_losses
from workflow.lib.objectives.kto import RatedAnswers
from workflow.lib.objectives.next_token import NEXT_TOKEN
from workflow.lib.objectives.objective import Objective
from workflow.lib.objectives.orpo import orpo_losses
from workflow.lib.objectives.pairs import Pairs, reward_by_reference
from workflow.lib.objectives.simpo import simpo_losses
from workflow.lib.settings.objectives import DistillConfig, ObjectiveName, PreferencesConfig

BETA = 0.1
SIMPO_BETA = 2.0  # arXiv 2405.14734, section 3


def _dpo(given: PreferencesConfig, beta: float) -> Objective:
    losses = dpo_losses(given.loss_type, beta=beta, label_smoothing=given.label_smoothing)
    return Pairs(losses, reward_by_reference(beta), given.sft_weight)


def _ipo(given: PreferencesConfig, beta: float) -> Objective:
    return Pairs(ipo_losses(tau=beta), reward_by_reference(beta), given.sft_weight)


def _simpo(given: PreferencesConfig, beta: float) -> Objective:
    losses = simpo_losses(beta=beta, gamma=given.gamma, label_smoothing=given.label_smoothing)
    return Pairs(losses, lambda answer: beta * answer.mean, given.sft_weight)


def _orpo(given: PreferencesConfig, beta: float) -> Objective:
    return Pairs(orpo_losses(beta=beta), lambda answer: beta * answer.mean, sft_weight=1.0)


def _kto(given: PreferencesConfig, beta: float) -> Objective:
    return RatedAnswers(beta, given.desirable_weight, given.undesirable_weight)


OF_PREFERENCES: Mapping[ObjectiveName, Callable[[PreferencesConfig, float], Objective]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
    "kto": _kto,
}


def objective_of(
    name: ObjectiveName, preferences: PreferencesConfig, distill: DistillConfig
) -> Objective:
    if name == "sft":
        return NEXT_TOKEN
    if name == "distill":
        return Distill(distill.temperature, distill.sft_weight)
    usual = SIMPO_BETA if name == "simpo" else BETA
    return OF_PREFERENCES[name](preferences, preferences.beta or usual)
