"""What the report says of sampled answers and their rewards, and what `evaluate.require` reads."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.support.report_examples import write_run
from tests.support.report_pages import Page
from workflow.lib.report.html_page import render_page
from workflow.lib.report.run_results import RunFolders, read_run
from workflow.lib.report.verdict import verdicts
from workflow.lib.rounds.answers import Answer, AnsweredPrompt, AnswerWriter
from workflow.lib.rounds.rewards import RewardLine
from workflow.lib.settings.config import ReportConfig
from workflow.lib.system.checksums import read_lines, write_lines
from workflow.lib.system.errors import UserError

TRAINED, HELD_OUT = 4, 7  # prompts
HOSTILE = "<script>alert(1)</script>"


def prompt(number, split):
    return AnsweredPrompt(
        split=split,
        file="rows.jsonl",
        row=number + 1,
        values={},
        prompt=[3, 4],
        text=f"{split} prompt {number} {HOSTILE}",
    )


def answer(text, length, finish="stop"):
    return Answer(ids=[5] * length, log_probs=[-1.0] * length, finish=finish, text=text)


def save_round(folder, *, better):
    """Save the answers of a round, whose held-out rewards are better by so much."""
    splits = ["train"] * TRAINED + ["heldout"] * HELD_OUT
    prompts = [prompt(number, split) for number, split in enumerate(splits)]
    writer = AnswerWriter(folder / "answers", prompts, facts=[], per_prompt=2)
    (shard,) = writer.prepare()
    two = [answer("good " + HOSTILE, 3), answer("bad", 5, finish="length")]
    writer.add(shard, [two] * len(prompts))
    writer.finish(sampler="ours", model_files={}, left_out=Counter())
    lines = []
    for number, split in enumerate(splits):
        rewards = [1.0, 0.5] if split == "train" else [better + number / 64, 0.25]
        if number == 1:
            rewards = [0.5, 0.5]
        if number == 2:
            rewards = [0.75, None]
        lines.append(RewardLine(split=split, rewards=rewards, numbers=[{}, {}], failures=[{}, {}]))
    rewards = folder / "rewards.jsonl"
    write_lines(rewards, [line.as_json() for line in lines])
    return rewards


@pytest.fixture
def runs(tmp_path):
    first = save_round(tmp_path / "first", better=0.25)
    second = save_round(tmp_path / "second", better=0.5)
    last = save_round(tmp_path / "last", better=1.0)
    found = []
    for name, rewards in (("demo-1", (first, second, first)), ("demo-2", (second, last, first))):
        folder = write_run(tmp_path, name, num_steps=3)
        lines = folder / "finetune" / "metrics.jsonl"
        told = {"clipped": 0.125, "reference_kl": 0.5, "entropy": 1.25, "ratio": 1.0}
        write_lines(lines, [step | told for step in read_lines(lines)])
        folders = RunFolders(
            str(folder),
            str(tmp_path / "tokens" / f"{name}-data"),
            answers=str(rewards[0].parent / "answers"),
            rewards=tuple(map(str, rewards)),
        )
        found.append(read_run(folders))
    return found


def test_rounds_are_told_with_their_rewards_lengths_and_signals(runs):
    first, second = (run.sampled for run in runs)
    assert (first.prompts, first.equal, first.without_reward) == (TRAINED, 2, 1)
    assert (first.answer_tokens, first.cut) == (4.0, 0.5)
    assert first.trained.value == pytest.approx((0.75 + 0.5 + 0.75 + 0.75) / 4)
    assert first.after == second.heldout
    for run, gain in ((first, 0.125), (second, 0.375)):
        assert run.gain.value == pytest.approx(gain)
        low, high = run.gain.ci95
        assert 0 < low <= gain <= high
    assert [group.rewards for group in first.groups] == [[1.0, 0.5]] * 2


def test_page_shows_figures_and_answers_and_escapes_them(runs):
    source = render_page(runs, report=ReportConfig(), settings={run.name: {} for run in runs})
    page = Page(source)
    for key in ("sampled", "clipped", "reference_kl", "entropy"):
        assert key in page.attributes("data-figure")
    assert {0.125, 0.5, 1.25} <= page.numbers
    assert HOSTILE not in source
    assert "Best, reward" in "".join(page.text)


def test_section_is_of_runs_that_sample_alone(tmp_path):
    folder = write_run(tmp_path, "plain", num_steps=3)
    run = read_run(RunFolders(str(folder), str(tmp_path / "tokens" / "plain-data")))
    assert run.sampled is None
    assert 'id="rounds"' not in render_page([run], report=ReportConfig(), settings={"plain": {}})


def test_required_reward_is_the_gain_since_the_first_round(runs):
    last = runs[1].measured
    for least, met in ((0.37, True), (0.38, False)):
        (verdict,) = verdicts({"reward": least}, last, by="estimate")
        assert (verdict.met, verdict.reference) == (met, "first round")
    with pytest.raises(UserError, match="its held-out prompts have no rewards"):
        verdicts({"reward": 0.1}, replace(last, reward_gain=None), by="estimate")
