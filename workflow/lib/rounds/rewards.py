"""Rewards of sampled answers on disk, and the advantages that follow from them.

Groups are the answers to one prompt. Advantages as in GRPO (arXiv 2402.03300, eq. 3), without the
deviation as in Dr. GRPO (2503.20783), against the other answers as in RLOO (2402.14740)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from workflow.lib.artifacts.records import Record
from workflow.lib.evaluation.intervals import Estimate, signed_ratio
from workflow.lib.rounds.answers import Answer, AnsweredPrompt
from workflow.lib.settings.config import RewardsConfig
from workflow.lib.system.errors import UserError

DEVIATION_FLOOR = 1e-4  # as in TRL's GRPOTrainer 1.16


class RewardLine(Record):
    """A line of `rewards.jsonl`: the rewards of the answers to a prompt, in their order."""

    advice: ClassVar[str] = "Delete its folder and repeat the command; score_answers makes it."

    split: Literal["train", "heldout"]  # whether the prompt is trained
    rewards: list[float | None]  # weighted sums; null: a function gave no number
    numbers: list[dict[str, dict[str, float]]]  # by function and name
    failures: list[dict[str, str]]  # reasons of the functions that gave none


@dataclass(frozen=True)
class Group:
    """A prompt, and its answers that have a reward."""

    prompt: AnsweredPrompt
    answers: list[Answer]
    rewards: list[float]

    @property
    def has_signal(self) -> bool:
        return len(set(self.rewards)) > 1

    def advantages(self, settings: RewardsConfig) -> list[float]:
        """Return the answers' advantages."""
        rewards = np.array(self.rewards)
        differences = rewards - rewards.mean()
        if settings.baseline == "leave_one_out":
            differences *= len(rewards) / max(1, len(rewards) - 1)
        if settings.scale == "deviation" and len(rewards) > 1:
            differences /= rewards.std(ddof=1) + DEVIATION_FLOOR
        advantages: list[float] = differences.tolist()
        return advantages


def groups_of(
    prompts: Sequence[AnsweredPrompt], lines: Sequence[RewardLine], *, split: str
) -> list[Group]:
    """Return the groups of a split with at least two rewards. Raises `UserError` for rewards of
    other answers."""
    if [prompt.split for prompt in prompts] != [line.split for line in lines]:
        raise UserError(
            "The rewards are of other answers. Delete their folder: they are made anew."
        )
    groups = []
    for prompt, line in zip(prompts, lines, strict=True):
        both = [
            (answer, reward)
            for answer, reward in zip(prompt.answers, line.rewards, strict=True)
            if reward is not None
        ]
        if prompt.split == split and len(both) > 1:
            answers, rewards = zip(*both, strict=True)
            groups.append(Group(prompt, list(answers), list(rewards)))
    return groups


def mean_rewards(lines: Sequence[RewardLine], *, split: str) -> list[float]:
    """Return the mean reward of each prompt of a split that has one."""
    means = (_mean(line) for line in lines if line.split == split)
    return [mean for mean in means if mean is not None]


def _mean(line: RewardLine) -> float | None:
    rewards = [reward for reward in line.rewards if reward is not None]
    return float(np.mean(rewards)) if rewards else None


def heldout_gains(first: Sequence[RewardLine], lines: Sequence[RewardLine]) -> list[float]:
    """Return the gains in mean reward of the held-out prompts, which both rounds sampled."""
    both = (
        [_mean(line) for line in rewards if line.split == "heldout"] for rewards in (first, lines)
    )
    pairs = zip(*both, strict=True)
    return [after - before for before, after in pairs if None not in (before, after)]


def mean_of(values: Sequence[float]) -> Estimate | None:
    """Return the mean of prompts with its interval; None without any."""
    return signed_ratio(values, [1.0] * len(values)) if values else None


def equal_groups(lines: Sequence[RewardLine]) -> tuple[int, int]:
    """Return how many training prompts have equal rewards alone, and how many there are."""
    own = [{*line.rewards} - {None} for line in lines if line.split == "train"]
    return sum(len(rewards) < 2 for rewards in own), len(own)
