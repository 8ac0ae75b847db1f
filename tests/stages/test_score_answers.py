"""The stage with rewards that misbehave: what is counted, told and kept."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_stage import forked_stage, refusal_of
from workflow.lib.artifacts.read_records import read_records
from workflow.lib.rounds.answers import Answer, AnsweredPrompt, AnswerWriter
from workflow.lib.rounds.rewards import RewardLine

FUNCTIONS = """
import os, sys, time

def reward(prompt, answer, row):
    if answer == "hang":
        time.sleep(3600)
    if answer == "busy":
        while True:
            pass
    if answer == "raise":
        raise KeyError("missing")
    if answer == "die":
        os._exit(3)
    if answer == "memory":
        return len(bytearray(2**33))
    if answer == "print":
        print("a line of the function")
        print("an error", file=sys.stderr)
    if answer == "text":
        return "1"
    if answer == "nan":
        return float("nan")
    if answer == "none":
        return None
    return {"length": len(answer), "prompt": prompt == row["q"]}

def bad(prompt, answer, row):
    return None
"""
ANSWERS = ["hang", "busy", "raise", "die", "memory", "print", "text", "nan", "none", "good"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scoring")
    (folder / "own.py").write_text(FUNCTIONS)
    prompts = [
        AnsweredPrompt(split=split, file="f", row=1, values={"q": "ask"}, prompt=[1, 2], text="ask")
        for split in ("train", "heldout")
    ]
    writer = AnswerWriter(folder / "answers", prompts, facts=0, per_prompt=len(ANSWERS))
    answers = [Answer(ids=[3], log_probs=[-1.0], finish="stop", text=text) for text in ANSWERS]
    plain = [Answer(ids=[3], log_probs=[-1.0], finish="stop", text="same")] * len(ANSWERS)
    (shard,) = writer.prepare()
    writer.add(shard, [answers, plain])
    writer.finish(sampler="test", model_files={}, left_out=Counter())
    return folder


def score(folder: Path, output: Path, functions: dict[str, Any], **options: Any):
    rewards = {"functions": functions, "seconds": 1.0, "memory_gib": 0.5}
    return forked_stage(
        "score_answers",
        answers=folder / "answers",
        output=output,
        config={"rewards": rewards},
        processes=2,
        **options,
    )


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("rewards") / "rewards.jsonl"
    functions = {
        "own": {"function": f"{folder}/own.py:reward", "weight": 0.5},
        "short": {"function": "length", "options": {"at_most": 2}},
    }
    done = score(folder, output, functions)
    assert done.returncode == 0, done.stderr
    return read_records(output, RewardLine), done.stderr


def test_answers_whose_function_fails_have_no_reward_and_a_reason(finished):
    (line, _), _ = finished
    reasons = dict(zip(ANSWERS, line.failures, strict=True))
    assert "takes more than rewards.seconds = 1" in reasons["hang"]["own"]
    assert (
        "takes more than" in reasons["busy"]["own"]
    )  # its processor time or, on a busy machine, all
    assert reasons["raise"]["own"] == "raises KeyError: 'missing'"
    assert reasons["die"]["own"] == "ended its process (exit status 3)"
    assert "takes more than 512 MiB of memory" in reasons["memory"]["own"]
    for kind in ("text", "nan", "none"):
        assert "a reward must be a finite number" in reasons[kind]["own"]
    failing = {*ANSWERS} - {"print", "good"}
    assert {name for name, reason in reasons.items() if reason} == failing
    assert [reward is None for reward in line.rewards] == [name in failing for name in ANSWERS]


def test_reward_is_the_weighted_sum_of_all_numbers_of_all_functions(finished):
    (line, other), _ = finished
    assert line.rewards[-1] == 0.5 * (4 + 1) + 2 / 4
    assert line.numbers[-1] == {"own": {"length": 4.0, "prompt": 1.0}, "short": {"reward": 0.5}}
    assert set(other.rewards) == {3.0}


def test_failures_prints_and_means_are_told(finished):
    _, said = finished
    assert "8 of 20 answers have no reward and are not trained: own " in said
    assert "reward functions printed: a line of the function" in said
    assert "mean reward of 1 train prompts: 3.2" in said
    assert "0 of 1 training prompts have answers of equal rewards" in said


def test_reward_that_never_gives_a_number_stops_the_stage(folder, tmp_path):
    functions = {"own": {"function": f"{folder}/own.py:bad"}}
    said = refusal_of(score(folder, tmp_path / "rewards", functions), output=tmp_path / "rewards")
    assert "none of 20 answers got a reward: own raises TypeError: a reward must be" in said


def test_file_that_cannot_be_imported_is_one_message(folder, tmp_path):
    (tmp_path / "own.py").write_text("import nothing_of_this_name")
    functions = {"own": {"function": f"{tmp_path}/own.py:reward"}}
    said = refusal_of(score(folder, tmp_path / "rewards", functions), output=tmp_path / "rewards")
    assert "cannot be imported: ModuleNotFoundError" in said
