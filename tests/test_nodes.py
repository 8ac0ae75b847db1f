"""The place of a node in a run, from what Slurm says; and a training of two launchers that meet."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workflow.lib.errors import UserError
from workflow.lib.nodes import ALONE, Place, find_place, follows

STEP = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_JOB_ID": "123456",
}


def test_place_in_a_step_of_two_nodes() -> None:
    assert find_place(2, STEP) == Place(2, 1, address="10.0.0.7", port=23456, run_id="123456")


def test_run_on_one_node_stays_alone_inside_a_job_of_slurm() -> None:
    assert find_place(1, STEP) == ALONE


@pytest.mark.parametrize("environment", [{}, STEP], ids=["no step", "step on two"])
def test_run_on_more_nodes_than_it_was_started_on_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"hardware\.nodes = 3: this run was started on \d node"):
        find_place(3, environment)


def test_every_node_but_the_first_follows() -> None:
    steps = [STEP | {"SLURM_NODEID": str(node)} for node in range(2)]
    assert [follows(step) for step in [*steps, {}]] == [False, True, False]


def test_launchers_of_two_nodes_start_one_world(tmp_path: Path) -> None:
    program = (
        "import os; from workflow.lib.launch import launch_workers; from workflow.lib.nodes import find_place;"
        f"launch_workers('tests.launch_worker', ['note', {str(tmp_path)!r}], processes=4, place=find_place(2, os.environ))"
    )
    step = STEP | {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_JOB_ID": str(os.getpid())}
    root = Path(__file__).resolve().parents[1]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=root,
            env=os.environ | step | {"SLURM_NODEID": str(node), "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]
    assert [launcher.wait(timeout=300) for launcher in launchers] == [0, 0]
    notes = {path.name: path.read_text().split()[:2] for path in tmp_path.iterdir()}
    assert notes == {"0": ["4", "0"], "1": ["4", "1"], "2": ["4", "0"], "3": ["4", "1"]}
