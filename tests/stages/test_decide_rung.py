"""A sweep with rungs by the real Snakefile."""

import json

import pytest

from tests.support.workflow_project import ADAPTER, make_project
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.rungs import Rung

pytestmark = pytest.mark.slow

RUNS = {
    "good": {},
    "idle": {"train": {"learning_rate": 1e-9}},
    "still": {"train": {"learning_rate": 1e-10}},
}
STEADY = {"lr_schedule": "constant", "warmup_share": 0.0, "max_steps": 6}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A sweep after `snakemake report`: two of its runs hardly move."""
    project = make_project(
        tmp_path_factory.mktemp("sweep"),
        train=STEADY,
        hardware={"cpu_processes": 1},
        evaluate={"samples": 0},
        sweep={"rungs": [4, 5, 6]},
    )
    project.write_settings(project.settings | {"runs": RUNS})
    project.run("report")
    return project


def test_runs_that_are_surely_worse_are_not_trained_further_and_one_alone_meets_no_rung(project):
    rung = read_record(project.root / "results" / "sweep" / "rung-4.json", Rung)
    assert rung.going_on == ["good"]
    trained = {path.parent.name for path in project.root.glob("results/runs/*/finetune")}
    assert trained == {"good@4", "idle@4", "still@4", "good"}


def test_run_that_goes_on_is_that_without_rungs_byte_for_byte(project, tmp_path):
    alone = project.copy(tmp_path / "alone")
    for folder in ("runs", "checkpoints", "sweep"):
        (alone.root / "results" / folder).rename(alone.root / folder)
    alone.write_settings(alone.settings | {"sweep": {}, "runs": {"good": {}}})
    alone.run("train")
    summary = project.json("finetune", "summary.json", run="good")
    assert summary["resumed_from_steps"] == [4]
    adapters = [p.folder("consolidate", "good") / ADAPTER for p in (project, alone)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_report_shows_every_decision_and_what_was_saved(project):
    page = (project.root / "results" / "report" / "report.html").read_text(encoding="utf-8")
    assert page.count("ends: surely worse") == 2
    assert '<data value="4">4</data> of <data value="18">18</data> steps' in page


def test_repeated_command_does_nothing_and_a_new_last_rung_keeps_the_earlier_one(project, tmp_path):
    assert project.snakemake("--dry-run", "report").nothing_to_do
    longer = project.copy(tmp_path / "longer")
    longer.edit({"sweep": {"rungs": [4, 5, 7]}, "train": {"max_steps": 7}})
    jobs = [json.dumps(job.wildcards) for job in longer.plan("train")["finetune"]]
    assert jobs == ['{"run": "good"}']
