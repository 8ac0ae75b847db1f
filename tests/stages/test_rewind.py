"""The command: it goes back while nobody trains the run, and the plain command then trains it."""

import argparse
import os

import pytest

from tests.support.forked_stage import forked_stage
from tests.support.workflow_project import make_project
from workflow.lib.system.errors import UserError
from workflow.lib.system.locks import exclusive
from workflow.scripts.rewind import main

KEYS, OLDER = "0123456789ab-cdef01234567", "ffffffffffff-cdef01234567"


def rewind(results, run, step):
    main(argparse.Namespace(results=results, run=run, step=step))


def checkpoints(results, name, *steps, age_s=0):
    folder = results / "checkpoints" / name
    for step in steps:
        (folder / f"step-{step:08}").mkdir(parents=True)
    modified = folder.stat().st_mtime - age_s
    os.utime(folder, (modified, modified))
    return folder


def test_checkpoints_of_a_training_under_way_are_left_alone(tmp_path):
    folder = checkpoints(tmp_path, f"demo-{KEYS}", 3, 7)
    with (
        exclusive(folder / ".lock", doing="training this run"),
        pytest.raises(UserError, match="is training this run"),
    ):
        rewind(tmp_path, "demo", 3)
    assert len([*folder.glob("step-*")]) == 2


def test_last_training_of_the_run_is_the_one_that_goes_back(tmp_path):
    """Beside it: another run, whose name begins with this one's, and an earlier training."""
    checkpoints(tmp_path, f"demo-{KEYS}", 5, 6)
    checkpoints(tmp_path, f"demo-2-{KEYS}", 8, 9)
    checkpoints(tmp_path, f"demo-{OLDER}", 3, 4, age_s=60)
    with pytest.raises(UserError, match="has no checkpoint of it, only those of steps 5, 6"):
        rewind(tmp_path, "demo", 1)


@pytest.mark.parametrize("name", ["other", "demo-2-", "*", "."])
def test_run_without_checkpoints_is_answered_with_those_that_have_some(tmp_path, name):
    checkpoints(tmp_path, f"demo-{KEYS}", 5)
    checkpoints(tmp_path, f"second-{KEYS}", 5)
    with pytest.raises(UserError, match=r"checkpoints has those of demo, second\."):
        rewind(tmp_path, name, 5)


def test_finished_run_that_went_back_is_trained_again(finished_project, tmp_path):
    project = finished_project.copy(tmp_path / "project")
    done = forked_stage("rewind", "demo", "40", results=project.root / "results")
    assert "the next start goes on after step 40; what came later, up to step 41" in done.stderr
    assert project.planned("train") == {"finetune": 1, "consolidate": 1}


def test_publishing_without_a_repository_is_refused_without_a_traceback(tmp_path):
    refused = make_project(tmp_path / "project").snakemake("publish")
    assert refused.status == 1
    assert "export.hub_repo names no repository" in refused.output
    assert "Traceback" not in refused.output
