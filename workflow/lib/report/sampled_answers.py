"""The answers that a run sampled before its training, and their rewards, for the report."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from workflow.lib.artifacts.read_records import read_records
from workflow.lib.evaluation.intervals import Estimate
from workflow.lib.rounds.answers import read_answers
from workflow.lib.rounds.rewards import (
    Group,
    RewardLine,
    equal_groups,
    groups_of,
    heldout_gains,
    mean_of,
    mean_rewards,
)


@dataclass(frozen=True)
class Sampled:
    """Answers of the model that a run began with. Rewards are means over prompts; None without any
    reward."""

    trained: Estimate | None  # of training prompts
    heldout: Estimate | None  # of held-out prompts, which are the same in all rounds
    after: Estimate | None  # of these after the training
    gain: Estimate | None  # of these since the first round, paired
    prompts: int  # training prompts
    equal: int  # of these, whose answers have equal rewards: they teach nothing
    answer_tokens: float  # mean length of an answer
    cut: float  # share of answers that their length ended
    without_reward: int  # answers
    groups: list[Group]  # training prompts whose answers have different rewards


def read_sampled(answers: Path, rewards: Path, after: Path, first: Path) -> Sampled:
    """Read the answers of a run and their rewards; after: rewards after its training; first: of the
    first round. Raises `UserError` if files are damaged or do not belong together."""
    prompts, lines = read_answers(answers), read_records(rewards, RewardLine)
    equal, count = equal_groups(lines)
    every = [answer for prompt in prompts for answer in prompt.answers]
    groups = [group for group in groups_of(prompts, lines, split="train") if group.has_signal]
    return Sampled(
        trained=mean_of(mean_rewards(lines, split="train")),
        heldout=mean_of(mean_rewards(lines, split="heldout")),
        after=mean_of(mean_rewards(read_records(after, RewardLine), split="heldout")),
        gain=reward_gain(after, first),
        prompts=count,
        equal=equal,
        answer_tokens=fmean(len(answer.ids) for answer in every),
        cut=fmean(answer.finish == "length" for answer in every),
        without_reward=sum(line.rewards.count(None) for line in lines),
        groups=groups,
    )


def reward_gain(after: Path, first: Path) -> Estimate | None:
    """Return the gain in mean reward of the held-out prompts since the first round, paired; None
    without any reward."""
    return mean_of(heldout_gains(*(read_records(path, RewardLine) for path in (first, after))))
