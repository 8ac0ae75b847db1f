"""Rounds as artifacts: one finished run of two rounds on a tiny model, and what edits run again."""

import json
import shutil

import pytest

from tests.support.workflow_project import make_project, write_rows
from workflow.lib.data.tokens.token_store import TokenStore

SAMPLING = ["sample_answers", "score_answers", "pack_answers"]
TRAINING = ["finetune", "consolidate"]
ROUND = [*SAMPLING, *TRAINING]
REWARDS = {"functions": {"short": {"function": "length", "options": {"at_most": 3}}}}


def times(count, rules):
    return dict.fromkeys(rules, count)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Best answers of two rounds, trained. Never change it."""
    project = make_project(
        tmp_path_factory.mktemp("rounds") / "finished",
        train={"max_steps": 2, "checkpoint_every_steps": 1},
        hardware={"cpu_processes": 1},
        answers={
            "per_prompt": 3,
            "prompts_per_round": 8,
            "heldout_prompts": 3,
            "max_new_tokens": 5,
        },
    )
    project.write_settings(project.settings | {"runs": {"r": {"rounds": 2, "rewards": REWARDS}}})
    project.run("train")
    return project


@pytest.fixture
def project(finished, tmp_path):
    return finished.copy(tmp_path / "project")


def runs(project, jobs):
    return sorted(job.wildcards["run"] for job in project.plan("train")[jobs])


def edit_run(project, **changes):
    project.edit({"runs": {"r": changes}})


def test_finished_rounds_run_nothing_again_and_each_began_from_the_one_before(finished):
    assert finished.planned("train") == {}
    assert finished.json("finetune", "summary.json", "r-2")["lineage"][-1]["run"] == "r-1"


def test_round_trains_on_the_sampled_tokens_of_the_best_answers(finished):
    folders = [path.parent for path in finished.root.glob("results/tokens/*/manifest.json")]
    counts = [
        TokenStore.open(folder).manifest["splits"]["train"]["documents"] for folder in folders
    ]
    assert sorted(counts)[-1] == 60  # the rows themselves
    assert all(0 < count <= 8 for count in sorted(counts)[:-1])
    assert len(counts) == 3


def test_more_rounds_train_the_new_ones_alone(project):
    edit_run(project, rounds=4)
    assert project.planned("train") == {"preflight_run": 2, **times(2, ROUND)}
    assert runs(project, "finetune") == ["r-3", "r-4"]


def test_changed_learning_rate_trains_again_and_keeps_the_first_answers(project):
    edit_run(project, train={"learning_rate": 2e-2})
    planned = project.planned("train")
    assert planned == {"preflight_run": 2, **times(1, SAMPLING), **times(2, TRAINING)}


def test_changed_reward_keeps_the_first_answers(project):
    edit_run(project, rewards={"functions": {"short": {"weight": 2.0}}})
    planned = project.planned("train")
    expected = {"sample_answers": 1, **times(2, [*SAMPLING[1:], *TRAINING])}
    assert planned == expected


def test_edited_file_of_a_users_reward_scores_again_and_keeps_the_first_answers(project):
    own = project.root / "own.py"
    own.write_text("def reward(prompt, answer, row):\n    return len(answer)\n")
    functions = {"short": {"function": "own.py:reward", "options": {}}}
    project.edit({"runs": {"r": {"rounds": 1}}})
    settings = project.settings
    settings["runs"]["r"]["rewards"]["functions"] = functions
    project.write_settings(settings)
    project.run("train")
    assert project.planned("train") == {}
    own.write_text("def reward(prompt, answer, row):\n    return -len(answer)\n")
    assert project.planned("train") == times(1, [*SAMPLING[1:], *TRAINING])


def test_edited_prompts_run_everything_again(project):
    write_rows(project.root / "data" / "train.jsonl", first=7, rows=60)
    expected = {"tokenize_dataset": 1, "preflight_run": 2, **times(2, ROUND)}
    assert project.planned("train") == expected


@pytest.mark.parametrize(
    ("lost", "rules"),
    [
        ("results/runs/r-2/finetune", TRAINING),
        ("results/runs/r-2/consolidate", ["consolidate"]),
    ],
)
def test_killed_round_continues_where_it_was(project, lost, rules):
    shutil.rmtree(project.root / lost)
    assert project.planned("train") == once(rules)


def once(rules):
    return times(1, rules)


def test_rewards_that_are_all_equal_stop_the_run(project):
    functions = {"short": {"function": "length", "options": {"at_most": 10_000}}}
    edit_run(project, rounds=1, rewards={"functions": functions})
    done = project.snakemake("train")
    assert done.status == 1
    assert "rewards.stop_after_equal = 1: in 1 round(s) in a row the answers" in done.output
    assert "Traceback" not in done.output


def test_round_of_equal_rewards_is_trained_until_as_many_as_set_stop_the_run(project):
    functions = {"short": {"function": "length", "options": {"at_most": 10_000}}}
    rewards = {"functions": functions, "stop_after_equal": 2}
    run = {"rounds": 3, "rewards": rewards, "train": {"objective": "grpo"}, "data": {"seq_len": 64}}
    project.write_settings(project.settings | {"runs": {"equal": run}})
    done = project.snakemake("train")
    assert done.status == 1
    assert "this round teaches nothing" in done.output
    assert "rewards.stop_after_equal = 2: in 2 round(s) in a row the answers" in done.output
    trained = [project.folder("finetune", f"equal-{n}") / "summary.json" for n in (1, 2, 3)]
    assert [path.exists() for path in trained] == [True, False, False], done.output


@pytest.mark.parametrize(
    ("objective", "examples", "heldout"), [("simpo", "pairs", 6), ("grpo", "groups", 12)]
)
def test_objectives_of_sampled_answers_run_to_the_report(project, objective, examples, heldout):
    edit_run(project, rounds=1, train={"objective": objective}, data={"seq_len": 64})
    project.run("all")
    manifests = [
        json.loads(path.read_text()) for path in project.root.glob("results/tokens/*/manifest.json")
    ]
    (packed,) = [facts for facts in manifests if facts.get("examples") == examples]
    assert packed["splits"]["heldout"]["documents"] == heldout
    assert (project.root / "results" / "report" / "report.html").is_file()
