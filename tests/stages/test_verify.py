"""`snakemake verify`: what the command says, and that it makes nothing."""

from tests.support.certificates import add_items, certify
from tests.support.report_examples import write_run
from tests.support.workflow_project import make_project
from workflow.lib.system.files import read_json, write_json


def test_certificate_is_verified_by_a_command_that_runs_no_stage(tmp_path):
    project = make_project(tmp_path / "project")
    add_items(write_run(project.root, "demo", num_steps=3))
    named = f"certificate={certify(project.root, 'demo')}"
    done = project.snakemake("verify", "--config", named)
    assert done.status == 0, done.output
    assert "6 of 6 files are those that were certified" in done.output
    said = read_json(project.root / named.partition("=")[2])
    said["predicate"]["measured"]["tuned"]["heldout"]["loss"] = 1.0
    write_json(project.root / named.partition("=")[2], said)
    refused = project.snakemake("verify", "--config", named)
    assert refused.status == 1
    assert "tuned.heldout.loss = 1.0, found 1.88" in refused.output
    assert not (project.root / "results").exists()


def test_command_without_a_certificate_says_how_to_name_one(tmp_path):
    refused = make_project(tmp_path / "project").snakemake("verify")
    assert refused.status == 1
    assert "snakemake verify --config certificate=FILE" in refused.output
