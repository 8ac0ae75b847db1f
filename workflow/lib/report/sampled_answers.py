"""The answers that a run sampled before its training, and their rewards, for the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from workflow.lib.artifacts.read_records import read_records
from workflow.lib.evaluation.intervals import Estimate, signed_ratio
from workflow.lib.rounds.answers import read_answers
from workflow.lib.rounds.rewards import (
    RewardLine,
    equal_groups,
    groups_of,
    heldout_gains,
    mean_rewards,
)


class ShownAnswer(NamedTuple):
    kind: str  # best or worst
    reward: float
    text: str


class ShownPrompt(NamedTuple):
    """A prompt with its best and its worst answer."""

    row: int
    text: str
    answers: tuple[ShownAnswer, ...]


@dataclass(frozen=True)
class Sampled:
    """Answers of the model that a run began with. Rewards are means over prompts."""

    trained: Estimate | None  # of training prompts; None without any reward
    heldout: Estimate | None  # of held-out prompts, which are the same in all rounds
    gain: Estimate | None  # of held-out prompts since the first round, paired; None in the first
    prompts: int  # training prompts
    equal: int  # of these, whose answers have equal rewards: they teach nothing
    answer_tokens: float  # mean length of an answer
    cut: float  # share of answers that their length ended
    without_reward: int  # answers
    shown: list[ShownPrompt]


def read_sampled(answers: Path, rewards: Path, first: Path | None) -> Sampled:
    """Read the answers of a run and their rewards; first: rewards of the first round. Raises
    `UserError` if files are damaged or do not belong together."""
    prompts, lines = read_answers(answers), read_records(rewards, RewardLine)
    equal, count = equal_groups(lines)
    every = [answer for prompt in prompts for answer in prompt.answers]
    groups = [group for group in groups_of(prompts, lines, split="train") if group.has_signal]
    return Sampled(
        trained=mean_of(mean_rewards(lines, split="train")),
        heldout=mean_of(mean_rewards(lines, split="heldout")),
        gain=reward_gain(rewards, first),
        prompts=count,
        equal=equal,
        answer_tokens=fmean(len(answer.ids) for answer in every),
        cut=fmean(answer.finish == "length" for answer in every),
        without_reward=sum(line.rewards.count(None) for line in lines),
        shown=[
            ShownPrompt(
                group.prompt.row,
                group.prompt.text,
                tuple(
                    ShownAnswer(kind, reward, group.answers[group.rewards.index(reward)].text)
                    for kind, reward in (
                        ("best", max(group.rewards)),
                        ("worst", min(group.rewards)),
                    )
                ),
            )
            for group in groups
        ],
    )


def reward_gain(rewards: Path, first: Path | None = None) -> Estimate | None:
    """Return the gain in mean reward of the held-out prompts since the first round, paired."""
    if first is None:
        return None
    return mean_of(heldout_gains(*(read_records(path, RewardLine) for path in (first, rewards))))


def mean_of(values: Sequence[float]) -> Estimate | None:
    return signed_ratio(values, [1.0] * len(values)) if values else None
