"""`rounds: N` becomes N runs before anything else is read, and wrong settings are named."""

import pytest

from workflow.lib.settings.config import load_config
from workflow.lib.settings.rounds import expanded
from workflow.lib.system.errors import UserError

LENGTH = {"functions": {"short": {"function": "length"}}}


def message(**document):
    with pytest.raises(UserError) as caught:
        load_config(document)
    return str(caught.value)


def test_rounds_are_runs_that_start_from_each_other_and_take_the_next_prompts():
    document = {"runs": {"other": None, "r": {"rounds": 3, "train": {"start_from": "other"}}}}
    runs = expanded(document)["runs"]
    assert list(runs) == ["other", "r-1", "r-2", "r-3"]
    starts = [runs[name]["train"].get("start_from") for name in ("r-1", "r-2", "r-3")]
    assert starts == ["other", "r-1", "r-2"]
    assert [runs[f"r-{n}"]["answers"]["round"] for n in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize("rounds", [0, 1001, True, "3", 2.0, None])
def test_wrong_number_of_rounds_is_named(rounds):
    said = message(runs={"r": {"rounds": rounds}})
    assert said.startswith("runs.r.rounds = ")
    assert "it must be a whole number, 1 to 1000" in said


def test_name_of_a_round_that_another_run_has_is_refused():
    said = message(runs={"r": {"rounds": 2}, "r-2": {}})
    assert "runs.r.rounds = 2: it makes a run r-2, and another run has this name" in said


REFUSED = [
    ({"runs": {"r": {"rounds": 2}}}, "rewards.functions = {}: rounds are set"),
    ({"answers": {"per_prompt": 4}}, "rewards.functions = {}: answers are set"),
    ({"train": {"objective": "grpo"}}, "train.objective = grpo trains on sampled answers"),
    (
        {"rewards": LENGTH, "train": {"objective": "kto"}},
        "train.objective = kto does not train on sampled answers. Set one of sft, dpo",
    ),
    (
        {"rewards": LENGTH, "answers": {"prompts_per_round": 0}},
        "answers.prompts_per_round = 0: a round trains on prompts",
    ),
    (
        {"rewards": LENGTH, "data": {"seq_len": 256}},
        "answers.max_new_tokens = 256: a row has data.seq_len = 256 tokens, prompt included",
    ),
    (
        {"rewards": {"functions": {"a": {"function": "last_numbr"}}}},
        "function = last_numbr: no such function is shipped. Name one of last_number, boxed",
    ),
    (
        {"rewards": {"functions": {"a": {"function": "exact.txt:reward"}}}},
        "function = exact.txt:reward: no such function is shipped. Name one of last_number, boxed, "
        "regex, json, length, or your own as path.py:name",
    ),
]


@pytest.mark.parametrize(("document", "expected"), REFUSED)
def test_settings_that_cannot_work_together_are_named(document, expected):
    assert expected in message(**document)
