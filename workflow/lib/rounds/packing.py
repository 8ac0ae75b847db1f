"""What a round trains: the best answers, pairs of best and worst, or all answers with advantages.

Prompts whose answers have equal rewards teach nothing and are left out, unless no prompt of the
round has others: such a round trains on what it has, and enough of them in a row stop the run."""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from workflow.lib.data.tokens import group_rows
from workflow.lib.rounds.answers import Answer
from workflow.lib.rounds.rewards import Group, RewardLine, equal_groups
from workflow.lib.settings.config import RewardsConfig
from workflow.lib.settings.objectives import Examples
from workflow.lib.system.errors import setting_error

logger = logging.getLogger("workflow")


def trained_groups(
    groups: Sequence[Group], examples: Examples, settings: RewardsConfig, *, seq_len: int
) -> list[group_rows.Group]:
    """Return the answers of each prompt that a round trains on; logs what is left out."""
    telling = [group for group in groups if group.has_signal] or groups
    packed = [
        group_rows.Group(
            prompt=group.prompt.prompt,
            answers=[
                group_rows.Answer(answer.ids, answer.log_probs, advantage)
                for answer, advantage in CHOICES[examples](group, settings)
            ],
            file=group.prompt.file,
            row=group.prompt.row,
        )
        for group in telling
    ]
    fitting = [group for group in packed if examples != "pairs" or _length(group) <= seq_len]
    if left_out := len(packed) - len(fitting):
        logger.warning(
            "%d of %d pairs are longer than data.seq_len = %d and are left out. Raise it, or lower "
            "answers.max_new_tokens",
            left_out,
            len(packed),
            seq_len,
        )
    return fitting


Chosen = list[tuple[Answer, float]]


def _pair(group: Group, settings: RewardsConfig) -> Chosen:
    best, worst = (int(choose(group.rewards)) for choose in (np.argmax, np.argmin))
    if best == worst:  # equal rewards
        worst = len(group.rewards) - 1
    return [(group.answers[best], 0.0), (group.answers[worst], 0.0)]


# The answers of a group that are trained, with their advantages, by the examples of the objective.
CHOICES: Mapping[Examples, Callable[[Group, RewardsConfig], Chosen]] = {
    "texts": lambda group, settings: _pair(group, settings)[:1],
    "pairs": _pair,
    "groups": lambda group, settings: list(
        zip(group.answers, group.advantages(settings), strict=True)
    ),
}


def _length(group: group_rows.Group) -> int:
    return sum(len(group.prompt) + len(answer.ids) for answer in group.answers)


def check_signal(rounds: Sequence[Sequence[RewardLine]], settings: RewardsConfig) -> None:
    """Raise `UserError` if no prompt of the last rounds has answers of other rewards. rounds: their
    rewards, this round's first."""
    silent = [equal == prompts for equal, prompts in map(equal_groups, rounds)]
    if not silent[0]:
        return
    if len(silent) >= settings.stop_after_equal and all(silent):
        raise setting_error(
            "rewards.stop_after_equal",
            settings.stop_after_equal,
            f"in {len(silent)} round(s) in a row the answers to every prompt have equal rewards: "
            "there is nothing to learn",
            "Take a reward that tells answers apart, other prompts, a higher answers.temperature "
            "or more answers.per_prompt",
        )
    logger.warning("the answers to every prompt have equal rewards: this round teaches nothing")
