"""Groups, advantages and what a round trains, on rewards by hand."""

import math

import pytest

from workflow.lib.rounds.answers import Answer, AnsweredPrompt
from workflow.lib.rounds.packing import check_signal, trained_groups
from workflow.lib.rounds.rewards import (
    RewardLine,
    equal_groups,
    groups_of,
    heldout_gains,
    mean_rewards,
)
from workflow.lib.settings.config import RewardsConfig
from workflow.lib.system.errors import UserError


def line(*rewards, split="train"):
    nothing = [{} for _ in rewards]
    return RewardLine(split=split, rewards=[*rewards], numbers=nothing, failures=nothing)


def prompt(number, answers, split="train"):
    return AnsweredPrompt(
        split=split,
        file="rows.jsonl",
        row=number,
        values={},
        prompt=[1, number],
        text="",
        answers=[
            Answer(ids=[10 * number + n], log_probs=[-n / 8], finish="stop", text="")
            for n in range(answers)
        ],
    )


def groups(*lines):
    prompts = [prompt(n, len(own.rewards), own.split) for n, own in enumerate(lines, 1)]
    return groups_of(prompts, lines, split="train")


def test_answers_without_a_reward_and_prompts_with_one_alone_are_no_part_of_groups():
    lines = [line(1.0, None, 3.0), line(None, 2.0), line(1.0, 2.0, split="heldout")]
    (group,) = groups(*lines)
    assert [answer.ids for answer in group.answers] == [[10], [12]]
    assert group.rewards == [1.0, 3.0]


def test_rewards_of_other_answers_are_refused():
    with pytest.raises(UserError, match="The rewards are of other answers"):
        groups_of([prompt(1, 2)], [line(1.0, 2.0, split="heldout")], split="train")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"scale": "none"}, [-2.0, 0.0, 2.0]),
        ({}, [-2.0 / 2.0001, 0.0, 2.0 / 2.0001]),  # deviation 2, as of a sample
        ({"scale": "none", "baseline": "leave_one_out"}, [1 - 4.0, 3 - 3.0, 5 - 2.0]),
    ],
)
def test_advantages_by_hand(settings, expected):
    (group,) = groups(line(1.0, 3.0, 5.0))
    advantages = group.advantages(RewardsConfig(**settings))
    assert all(map(math.isclose, advantages, expected))


def trained(examples, *lines, seq_len=99):
    return trained_groups(groups(*lines), examples, RewardsConfig(scale="none"), seq_len=seq_len)


@pytest.mark.parametrize(
    ("examples", "expected"),
    [("texts", [11]), ("pairs", [11, 12]), ("groups", [10, 11, 12])],
)
def test_objective_decides_what_is_trained_of_a_prompt(examples, expected):
    (group,) = trained(examples, line(1.0, 2.0, 0.0))
    assert [answer.ids[0] for answer in group.answers] == expected
    assert (group.prompt, group.file, group.row) == ([1, 1], "rows.jsonl", 1)


def test_prompts_of_equal_rewards_are_left_out_unless_all_are():
    silent, telling = line(1.0, 1.0), line(0.0, 1.0)
    assert [group.row for group in trained("groups", silent, telling)] == [2]
    (alone,) = trained("groups", silent)
    assert [answer.advantage for answer in alone.answers] == [0.0, 0.0]
    (pair,) = trained("pairs", silent)
    assert [answer.ids[0] for answer in pair.answers] == [10, 11]


def test_pairs_longer_than_a_row_are_left_out():
    assert trained("pairs", line(0.0, 1.0), seq_len=5) == []
    assert len(trained("pairs", line(0.0, 1.0), seq_len=6)) == 1


def test_run_stops_after_as_many_rounds_of_equal_rewards_as_set():
    silent, telling = [line(1.0, 1.0), line(2.0, None, 2.0)], [line(0.0, 1.0)]
    assert equal_groups(silent) == (2, 2)
    check_signal([telling, silent], RewardsConfig(stop_after_equal=1))
    check_signal([silent], RewardsConfig(stop_after_equal=2))
    check_signal([silent, telling], RewardsConfig(stop_after_equal=2))
    for rounds, count in (([silent], 1), ([silent, silent], 2)):
        with pytest.raises(UserError, match=f"in {count} round.* there is nothing to learn"):
            check_signal(rounds, RewardsConfig(stop_after_equal=count))


def test_gains_are_of_heldout_prompts_that_have_rewards_in_both_rounds():
    first = [line(1.0, 2.0), line(0.0, 1.0, split="heldout"), line(None, split="heldout")]
    last = [line(9.0, 9.0), line(1.0, 1.0, split="heldout"), line(1.0, split="heldout")]
    assert heldout_gains(first, last) == [0.5]
    assert mean_rewards(last, split="train") == [9.0]
