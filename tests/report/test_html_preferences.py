"""What report, comparison and card say of runs on preferences."""

import csv
import io
from collections import Counter
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from tests.report.test_model_card import read as read_card
from tests.support.report_examples import add_preferences, edit, write_run
from tests.support.report_pages import Page, read, rendered
from workflow.lib.report.comparison import behind_best, best_run, comparison_csv
from workflow.lib.report.html_page import both_fell, render_page, reward_figures
from workflow.lib.report.model_card import model_card
from workflow.lib.report.run_results import RunFolders, read_run
from workflow.lib.report.verdict import verdicts
from workflow.lib.rounds.answers import Answer, AnsweredPrompt, AnswerWriter
from workflow.lib.rounds.rewards import RewardLine
from workflow.lib.settings.config import ReportConfig
from workflow.lib.system.checksums import read_lines, write_lines
from workflow.lib.system.errors import UserError


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=13)
    add_preferences(folder)
    return folder


def words(page):
    return " ".join("".join(Page(page).text).split())


def test_section_is_of_runs_on_preferences_alone(tmp_path, run):
    write_run(tmp_path, "plain", num_steps=13)
    assert 'id="preferences"' in rendered(tmp_path, "demo")
    assert 'id="preferences"' not in rendered(tmp_path, "plain")


def test_curves_hold_the_logged_rewards_of_both_kinds(tmp_path, run):
    (found,) = read(tmp_path, "demo")
    figures = {figure.key: figure for figure in reward_figures([found])}
    assert [*figures] == ["rewards", "log_probs", "reward_accuracy", "reward_margin"]
    chosen, rejected = figures["rewards"].data
    assert chosen["y"] == [step.reward_chosen for step in found.steps]
    assert rejected["y"] == [step.reward_rejected for step in found.steps]
    assert (chosen["line"]["dash"], rejected["line"]["dash"]) == ("solid", "dash")
    for figure in figures.values():
        go.Figure({"data": figure.data, "layout": figure.layout})  # raises on unknown properties


def test_curves_of_rated_answers_are_those_of_their_two_kinds(tmp_path):
    folder = write_run(tmp_path, "rated", num_steps=3)
    lines = folder / "finetune" / "metrics.jsonl"
    told = {"reward_desirable": 0.5, "reward_undesirable": -0.25, "kl": 0.125}
    write_lines(lines, [step | told for step in read_lines(lines)])
    figures = reward_figures(read(tmp_path, "rated"))
    names = [trace["name"] for figure in figures for trace in figure.data]
    assert names == ["rated, desirable", "rated, undesirable", "rated"]
    assert "reward undesirable" in words(rendered(tmp_path, "rated"))


@pytest.mark.parametrize("objective", ["dpo", "simpo"])
def test_it_is_said_where_both_kinds_became_less_likely(tmp_path, objective):
    for name, fall in (("falls", 0.5), ("rises", -0.5)):
        add_preferences(write_run(tmp_path, name, num_steps=13), objective, fall=fall)
    falls, rises = read(tmp_path, "falls", "rises")
    found = both_fell(falls)
    assert found.rejected < found.chosen < 0
    assert both_fell(rises) is None
    assert "chosen and rejected answers both became less likely" in words(
        rendered(tmp_path, "falls")
    )
    assert "became less likely against" not in words(rendered(tmp_path, "rises"))


def test_table_has_rewards_with_intervals_and_the_distance_to_the_reference(tmp_path, run):
    table = rendered(tmp_path, "demo").partition('id="rewards-numbers"')[2].partition("</table>")[0]
    text = words(f"<table>{table.partition('>')[2]}</table>")
    right, margin = "75.0 % [68.8 %, 81.2 %]", "+0.3750 [+0.2500, +0.5000]"
    ratios = "−0.0312 [−0.0625, −0.0156]−0.5000 [−0.7500, −0.2500]"  # noqa: RUF001
    assert f"tuned (served)61 pairs{right}{margin}{ratios}" in text


@pytest.mark.parametrize(
    ("objective", "gain", "words_of_it"),
    [
        ("dpo", 0.25, "lower than the reference"),
        ("dpo", 0.03125, "not clearly different from the reference"),
        ("dpo", -0.25, "higher than the reference"),
        ("simpo", 0.25, "lower than the NF4 base"),
    ],
)
def test_verdict_follows_the_interval_of_the_objectives_loss(
    tmp_path, objective, gain, words_of_it
):
    add_preferences(write_run(tmp_path, "demo", num_steps=13), objective, gain=gain)
    page = rendered(tmp_path, "demo")
    assert f"<h3>The objective's loss of held-out pairs is {words_of_it}'s</h3>" in page
    assert "Loss of the chosen answers alone: nats per trained token" in words(page)


def test_csv_has_rewards_of_runs_that_have_them(tmp_path, run):
    write_run(tmp_path, "plain", num_steps=13)
    rows = list(csv.DictReader(io.StringIO(comparison_csv(read(tmp_path, "demo", "plain")))))
    assert float(rows[0]["tuned_reward_accuracy"]) == 0.75
    assert float(rows[0]["tuned_reward_accuracy_ci95_low"]) == 0.6875
    assert float(rows[0]["tuned_chosen_log_ratio"]) == -0.03125
    assert rows[1]["tuned_reward_accuracy"] == ""
    assert "tuned_reward_accuracy" not in comparison_csv(read(tmp_path, "plain"))


@pytest.mark.parametrize(
    ("beta", "best", "behind", "measure"),
    [
        (0.25, "low", 0.125, "loss by the objective"),
        (0.5, "often", 4 / 61, "share of right rewards"),
    ],
)
def test_runs_of_one_objective_are_compared_by_its_loss(tmp_path, beta, best, behind, measure):
    """Of two betas the losses are other numbers: there the share of right rewards counts."""
    for name, accuracy, loss in (("often", 0.75, 0.625), ("low", 0.6875, 0.5)):
        folder = write_run(tmp_path, name, num_steps=13)
        add_preferences(folder, accuracy=accuracy)
        own = {"loss": loss, "per_example": [[loss, 1.0]] * 61}
        edit(folder / "evaluate_run" / "tuned.json", lambda d, x=own: d["objective"].update(x))
    edit(
        folder / "finetune" / "summary.json",
        lambda d: d["settings"]["preferences"].update(beta=beta),
    )
    runs = read(tmp_path, "low", "often")
    assert best_run(runs).name == best
    (distance,) = behind_best(runs).values()
    assert distance.value == pytest.approx(behind)
    assert f"Behind the best: {measure}, paired" in rendered(tmp_path, "low", "often")


def test_card_says_objective_reference_and_accuracy(run):
    text = model_card(read_card(run))
    assert "| Objective | dpo, reference start, beta 0.25 |" in text
    assert "Of 61 held-out pairs, its rewards are right in 75.0 % \\[68.8 %, 81.2 %\\]" in text
    assert (
        "| rewards that are right, of 61 held-out pairs |  | 75.0 % \\[68.8 %, 81.2 %\\] |  |"
        in text
    )
    assert "Its held-out loss of chosen answers (tuned: " in text
    assert "| loss on 127 held-out chosen answers, nats per token |" in text


def test_card_of_supervised_training_names_no_objective(tmp_path):
    assert "Objective" not in model_card(read_card(write_run(tmp_path, "plain", num_steps=3)))


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
