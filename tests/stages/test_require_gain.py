import json
import shutil
from dataclasses import dataclass

import pytest

from tests.support.forked_stage import forked_stage
from tests.support.report_examples import evaluation, items, objective_loss, rewards
from tests.support.workflow_project import Finished, Project, executed, make_project
from workflow.lib.artifacts.evaluation_record import ITEMS, Evaluation
from workflow.lib.report.verdict import Measured, refuse_unmet, verdicts
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json, write_checked_json

LOST = {
    "loss_difference": -0.25,
    "loss_difference_ci95": [-0.375, -0.125],
    "p_value": 0.001,
    "documents": 40,
    "sources": {},
}
TUNED = evaluation(
    "demo", "tuned"
)  # gains 1.475 [1.371, 1.580] of loss and 0.362 [0.302, 0.421] of acc


REWARDS = rewards(0.75)  # [0.6875, 0.8125], margin 0.375 [0.25, 0.5]


def judged(require, *, by="estimate", change=None):
    content = json.loads(json.dumps(TUNED))
    if change:
        change(content)
    base, tuned = (
        Evaluation.model_validate_json(json.dumps(d)) for d in (evaluation("demo", "base"), content)
    )
    return verdicts(require, Measured({"base": base, "tuned": tuned}, {}), by=by)


@pytest.mark.parametrize(
    ("name", "least", "by", "met"),
    [
        ("heldout_loss", 1.47, "estimate", True),
        ("heldout_loss", 1.48, "estimate", False),
        ("heldout_loss", 1.371, "interval", True),
        ("heldout_loss", 1.372, "interval", False),
        ("pydocs_mc/acc", 0.36, "estimate", True),
        ("pydocs_mc/acc", 0.36, "interval", False),
        ("pydocs_mc/acc_norm", 0.3, "estimate", True),
        ("reward_accuracy", 0.75, "estimate", True),
        ("reward_accuracy", 0.75, "interval", False),
        ("reward_margin", 0.25, "interval", True),
        ("reward_margin", 0.376, "estimate", False),
        ("other_text_loss", -0.25, "estimate", True),
        ("other_text_loss", -0.25, "interval", False),
        ("other_text_loss", -0.2, "estimate", False),
    ],
)
def test_gain_or_the_lower_end_of_its_interval_must_reach_the_requirement(name, least, by, met):
    def change(content):
        content.update(rewards=REWARDS)
        content["comparisons"]["base"]["other_texts"] = LOST

    (verdict,) = judged({name: least}, by=by, change=change)
    assert verdict.met is met


def test_required_loss_is_the_objectives_own_as_in_the_verdict():
    """Its gain is 0.25 [0.1875, 0.3125] over the reference; -log p of the answers gained 1.475."""

    def change(content):
        own = objective_loss(0.25, against="reference")
        content["objective"] = own | {"sources": {"qa": own | {"loss_difference": 0.125}}}

    whole, source = judged(
        {"heldout_loss": 0.26, "heldout_loss/qa": 0.1}, change=change, by="estimate"
    )
    assert (whole.gain, whole.reference, whole.met) == (0.25, "reference", False)
    assert (source.gain, source.met) == (0.125, True)


@pytest.mark.parametrize(("margin", "met"), [(0.03, True), (0.01, False)])
def test_source_may_lose_no_more_than_the_margin(margin, met):
    def lose(content):
        content["comparisons"]["base"]["sources"]["general"] = {
            "loss_difference": -0.005,
            "loss_difference_ci95": [-0.02, 0.01],
            "p_value": 0.5,
            "documents": 40,
        }

    (verdict,) = judged({"heldout_loss/general": -margin}, by="interval", change=lose)
    assert (verdict.gain, verdict.met) == (-0.005, met)
    with pytest.raises(UserError, match=r"no held-out document.*are of general"):
        judged({"heldout_loss/other": 0.0}, change=lose)


def test_gain_of_few_documents_has_no_interval_to_judge_by():
    few = {"documents": 5, "loss_difference_ci95": None, "p_value": 0.0625}
    with pytest.raises(UserError, match=r"require_by.*heldout_loss has no interval.*fewer than 6"):
        judged(
            {"heldout_loss": 0.0},
            by="interval",
            change=lambda content: content["comparisons"]["base"].update(few),
        )


def test_smaller_is_the_gain_of_a_metric_where_less_is_better():
    def less_is_better(content):
        content["tasks"]["pydocs_mc"]["metrics"]["acc"]["higher_is_better"] = False

    (verdict,) = judged({"pydocs_mc/acc": -0.4}, by="interval", change=less_is_better)
    assert verdict.gain == pytest.approx(-0.3618)
    assert verdict.gain_ci95 == pytest.approx((-0.4214, -0.3021))
    assert not verdict.met


def test_metric_that_was_not_measured_is_refused():
    with pytest.raises(
        UserError, match=r"evaluate\.require = 'pydocs_mc/f1': it is not measured.*pydocs_mc/acc"
    ):
        judged({"pydocs_mc/f1": 0.1})


def test_every_missed_requirement_of_every_run_is_named():
    verdicts_by_run = {
        "a": judged({"heldout_loss": 2.0, "pydocs_mc/acc": 0.0}),
        "b": judged({"pydocs_mc/acc": 0.5}, by="interval"),
    }
    with pytest.raises(UserError) as caught:
        refuse_unmet(verdicts_by_run)
    assert (
        "a: heldout_loss gained +1.475 over the NF4 base, required +2; b: pydocs_mc/acc gained"
        in str(caught.value)
    )
    assert "a: pydocs_mc" not in str(caught.value)


def test_missed_reward_is_told_as_what_it_is():
    missed = judged(
        {"reward_accuracy": 0.9}, change=lambda content: content.update(rewards=REWARDS)
    )
    with pytest.raises(UserError, match=r"demo: reward_accuracy is \+0\.75, required \+0\.9"):
        refuse_unmet({"demo": missed})


def gate(folder, least):
    evaluations = folder / "runs" / "demo" / "evaluate_run"
    write_checked_json(evaluations / "tuned.json", TUNED)
    write_checked_json(evaluations / "base.json", evaluation("demo", "base"))
    write_checked_json(evaluations / ITEMS, items("demo"))
    config = {"demo": {"require": {"heldout_loss": least}, "require_by": "estimate"}}
    output = folder / "requirements.json"
    return forked_stage("require_gain", config=config, runs_dir=folder / "runs", output=output)


def test_stage_writes_its_verdicts_if_all_are_met(tmp_path):
    assert gate(tmp_path, 1.0).returncode == 0
    written = read_checked_json(tmp_path / "requirements.json")
    assert [verdict["met"] for verdict in written["runs"]["demo"]] == [True]


def test_requirement_is_planned_only_where_there_is_one(tmp_path):
    project = make_project(tmp_path)
    assert "require_gain" not in project.planned("all")
    project.edit({"evaluate": {"require": {"heldout_loss": 0.1}}})
    assert project.planned("evaluate")["require_gain"] == 1


@dataclass(frozen=True)
class Missed:
    project: Project
    done: Finished


@pytest.fixture(scope="module")
def missed(finished_project, tmp_path_factory):
    """A project that lacks its report, and must gain more than it can."""
    project = finished_project.copy(tmp_path_factory.mktemp("require") / "project")
    shutil.rmtree(project.root / "results" / "report")
    project.edit({"evaluate": {"require": {"heldout_loss": 19.0}}})
    return Missed(project, project.snakemake("all"))


def test_missed_requirement_fails_the_workflow_and_keeps_what_is_made(missed):
    project, done = missed.project, missed.done
    assert done.status == 1
    stages = {
        "preflight_run": 1,
        "render_report": 1,
        "require_gain": 1,
    }  # it checks what is demanded
    assert executed(done.output) == stages
    page = (project.root / "results" / "report" / "report.html").read_text(encoding="utf-8")
    assert "The required gain is missed: the workflow ends with an error." in page
    assert (project.folder("consolidate") / "adapter" / "adapter_model.safetensors").is_file()
    assert not (project.root / "results" / "requirements.json").exists()
    assert "Traceback" not in done.output
    # Once, and after the last stage's lines, where a user looks.
    cause = "evaluate.require is not met. demo: heldout_loss gained"
    assert done.output.count(cause) == 1
    assert cause in done.output[done.output.index("rule require_gain:") :]


def test_requirement_is_judged_after_the_report_is_made(missed):
    """Snakemake starts nothing after a failure, so what is still to be made would be lost."""
    output = missed.done.output
    assert output.index("(Rule: render_report)") < output.index("rule require_gain:")
