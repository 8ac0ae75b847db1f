"""The stage: it goes back while nobody trains the run, and the plain command then trains it."""

import argparse

import pytest

from tests.support.workflow_project import make_project
from workflow.lib.system.errors import UserError
from workflow.lib.system.locks import exclusive
from workflow.scripts.rewind import main


def test_checkpoints_of_a_training_under_way_are_left_alone(tmp_path):
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000007").mkdir()
    args = argparse.Namespace(checkpoints=tmp_path, step=3, results=tmp_path / "finetune")
    with (
        exclusive(tmp_path / ".lock", doing="training this run"),
        pytest.raises(UserError, match="is training this run"),
    ):
        main(args)
    assert len([*tmp_path.glob("step-*")]) == 2


def test_finished_run_that_went_back_is_trained_again(finished_project, tmp_path):
    project = finished_project.copy(tmp_path / "project")
    done = project.run("rewind", "--config", "rewind=demo@40")
    assert "the next start goes on after step 40; what came later, up to step 41" in done.output
    assert project.planned("train") == {"finetune": 1, "consolidate": 1}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["rewind", "--config", "rewind=other@3"], "rewind = other@3: it must be RUN@STEP"),
        (["rewind", "--config", "rewind=demo"], "rewind = demo: it must be RUN@STEP (runs: demo)"),
        (["rewind"], "snakemake --cores 1 rewind --config rewind=RUN@STEP"),
        (["all", "--config", "rewind=demo@3"], "only the target of this name goes back"),
        (["all", "--config", "certificate=x"], "are read by the target verify alone"),
        (["verify"], "snakemake --cores 1 verify --config certificate=FILE_OR_REPO"),
        (["publish"], "export.hub_repo names no repository"),
    ],
)
def test_target_whose_setting_is_missing_or_wrong_says_how_without_a_traceback(
    tmp_path, command, said
):
    refused = make_project(tmp_path / "project").snakemake(*command)
    assert refused.status == 1
    assert said in refused.output
    assert "Traceback" not in refused.output
