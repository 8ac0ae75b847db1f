"""A run on answers with advantages: it begins at the round's start, and learns the better ones."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.support.distributed import run_distributed
from tests.support.finished import CONFIG, PLAN, arguments, finetune, prepare, write_manifest
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.tokens.group_rows import Answer, Group, write_groups
from workflow.lib.data.tokens.token_store import MANIFEST, REJECTS, TRUNCATED
from workflow.lib.settings.config import GrpoConfig

SEQ_LEN, GROUPS = 61, 9


def groups():
    """Return groups in which the answers with the token 11 are the better ones."""
    draw = np.random.default_rng(0)
    found = []
    for row in range(GROUPS):
        answers = []
        for length, good in ((3, True), (5, False), (4, True), (2, False)):
            ids = [11 if good else 12, *draw.integers(20, 90, length).tolist()]
            answers.append(Answer(ids, [-5.0] * len(ids), 1.0 if good else -1.0))
        found.append(Group(draw.integers(20, 90, 4).tolist(), answers, "prompts.jsonl", row + 1))
    return found


@pytest.fixture
def steps(tmp_path):
    prepare(tmp_path)
    texts = tmp_path / "tokens"
    write_manifest(tmp_path, texts / MANIFEST)
    for name in (REJECTS, TRUNCATED):
        (texts / name).touch()
    args = arguments(tmp_path)
    args.tokens = tmp_path / "groups"
    args.tokens.mkdir()
    tokenizer = load_tokenizer(tmp_path / "model")
    write_groups(args.tokens, groups(), texts=texts, seq_len=SEQ_LEN, seed=0, tokenizer=tokenizer)
    train = CONFIG.train.model_copy(update={"objective": "grpo", "log_every_steps": 1})
    config = CONFIG.model_copy(update={"train": train, "grpo": GrpoConfig(importance_cap=None)})
    shared = {"seq_len": SEQ_LEN, "shares_prompts": True, "start_reference": True}
    run_distributed(finetune, args, config, replace(PLAN, objective="grpo", **shared), world_size=2)
    return [json.loads(line) for line in (args.output / "metrics.jsonl").read_text().splitlines()]


def test_run_begins_at_the_start_of_the_round_and_learns_the_better_answers(steps):
    first, *_, last = steps
    assert first["ratio"] == 1
    assert first["reference_kl"] == first["clipped"] == 0
    assert last["loss"] < first["loss"]
    assert last["reference_kl"] > 0
    assert last["clipped"] > 0
