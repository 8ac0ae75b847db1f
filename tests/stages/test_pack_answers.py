"""The stage on answers and rewards by hand: the tokens folder of each kind of examples."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.tiny import tiny_tokenizer
from tests.support.tokenizing import Stage, documents_of
from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.data.tokens.token_store import MANIFEST, TokenStore
from workflow.lib.rounds.answers import Answer, AnsweredPrompt, AnswerWriter
from workflow.lib.rounds.rewards import RewardLine
from workflow.lib.system.checksums import write_lines

REWARDS = {
    "train": [[0.0, 2.0, 1.0], [1.0, 1.0, 1.0], [3.0, None, 5.0]],
    "heldout": [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
}
LINES = [(split, rewards) for split, lines in REWARDS.items() for rewards in lines]


def prompt_ids(number):
    return [5, 6, 7 + number]


def answer_ids(number, answer):
    return [20 + 3 * number + answer, 50, 2][: 2 + answer % 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packing")
    tiny_tokenizer(folder / "tokenizer")
    Stage(folder, folder / "tokenizer").run()
    prompts = [
        AnsweredPrompt(
            split=split, file="rows.jsonl", row=n + 1, values={}, prompt=prompt_ids(n), text=""
        )
        for n, (split, _) in enumerate(LINES)
    ]
    writer = AnswerWriter(folder / "answers", prompts, facts=0, per_prompt=3)
    answers = [
        [
            Answer(ids=ids, log_probs=[-0.5] * len(ids), finish="stop", text="")
            for ids in (answer_ids(n, answer) for answer in range(3))
        ]
        for n in range(len(prompts))
    ]
    (shard,) = writer.prepare()
    writer.add(shard, answers)
    writer.finish(sampler="test", model_files={}, left_out=Counter())
    save_rewards(folder / "rewards.jsonl", LINES)
    save_rewards(folder / "equal.jsonl", [(split, [1.0] * 3) for split, _ in LINES])
    return folder


def save_rewards(path: Path, lines: Any) -> None:
    rows = [
        RewardLine(split=split, rewards=rewards, numbers=[], failures=[])
        for split, rewards in lines
    ]
    write_lines(path, (row.as_json() for row in rows))


def pack(folder: Path, output: Path, examples: str, *, rewards: str = "rewards", **options: Any):
    stage = Stage(folder, Path())
    config = {"data": stage.config()["data"], "rewards": {"scale": "none"}, "examples": examples}
    return forked_stage(
        "pack_answers",
        tokens=folder / "tokens",
        answers=folder / "answers",
        rewards=folder / f"{rewards}.jsonl",
        tokenizer=folder / "tokenizer",
        output=output,
        config=config,
        **options,
    )


EXPECTED = {
    "texts": [(0, 1), (2, 2)],
    "pairs": [(0, 1), (0, 0), (2, 2), (2, 0)],
    "groups": [(0, 0), (0, 1), (0, 2), (2, 0), (2, 2)],
}


@pytest.mark.parametrize("examples", EXPECTED)
def test_tokens_are_those_that_were_sampled_and_the_objective_chooses_them(
    folder, tmp_path, examples
):
    done = pack(folder, tmp_path / "tokens", examples)
    assert done.returncode == 0, done.stderr
    store = TokenStore.open(tmp_path / "tokens")
    read_record(tmp_path / "tokens" / MANIFEST, Manifest)
    expected = {
        (*prompt_ids(n), *answer_ids(n, answer)): [False] * 3 + [True] * len(answer_ids(n, answer))
        for n, answer in EXPECTED[examples]
    }
    assert documents_of(store) == expected
    rows = TokenStore.open(folder / "tokens")
    if examples == "pairs":
        heldout = [ids.tolist() for ids, _ in store.heldout_documents()]
        pairs = [(3, 1), (3, 0), (4, 2), (4, 0)]
        assert heldout == [[*prompt_ids(n), *answer_ids(n, answer)] for n, answer in pairs]
    else:
        assert len(store.heldout_documents()) == len(rows.heldout_documents())


def test_advantages_are_against_the_mean_of_the_answers_with_a_reward(folder, tmp_path):
    assert pack(folder, tmp_path / "tokens", "groups").returncode == 0
    advantages = np.load(tmp_path / "tokens" / "train.advantages.npy")
    assert sorted(np.unique(advantages).tolist()) == [-1.0, 0.0, 1.0]


def test_equal_rewards_of_all_prompts_stop_the_run(folder, tmp_path):
    said = refusal_of(
        pack(folder, tmp_path / "tokens", "texts", rewards="equal"), output=tmp_path / "tokens"
    )
    assert "rewards.stop_after_equal = 1" in said
    assert "there is nothing to learn" in said
