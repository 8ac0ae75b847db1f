"""The environment of shell commands: this interpreter and this workflow, from any folder."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.preloaded_python import SETTLED, preloaded_python
from tests.support.shared import reserved_ports
from workflow.lib.artifacts.stage_logs import failure_causes
from workflow.lib.system.environment import (
    ALONE,
    FIRST_PORT,
    PORTS,
    RunNode,
    find_node,
    follows,
    is_worker,
    shipped_path,
    use_this_interpreter,
)
from workflow.lib.system.errors import UserError

ROOT = Path(__file__).parents[2]


def test_python_in_a_shell_is_this_one_and_finds_the_workflow_from_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    use_this_interpreter(ROOT)
    code = "import sys, workflow; print(sys.executable, workflow.__file__)"
    shell = subprocess.run(
        f'python -c "{code}"', shell=True, cwd=tmp_path, capture_output=True, text=True
    )
    interpreter, package = shell.stdout.split()
    assert Path(interpreter).parent == Path(sys.executable).parent
    assert Path(package).parent == ROOT / "workflow"


def test_what_was_set_before_stays_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("PYTHONPATH", "/other")
    use_this_interpreter(tmp_path)
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert os.environ["PYTHONPATH"] == f"{tmp_path}:/other"


def test_unset_path_of_modules_gets_no_empty_entry(monkeypatch, tmp_path):
    """An empty entry would mean the folder that the user is in."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin")
    use_this_interpreter(tmp_path)
    assert os.environ["PYTHONPATH"] == str(tmp_path)


@pytest.mark.parametrize(
    ("names", "expected"), [((), False), (("RANK",), False), (("RANK", "WORLD_SIZE"), True)]
)
def test_worker_is_known_by_torchruns_environment(monkeypatch, names, expected):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, "0")
    assert is_worker() is expected


STEP = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    "SLURM_JOB_ID": "123456",
}


def test_place_in_a_step_of_two_nodes():
    assert find_node(2, STEP) == RunNode(2, 1, address="10.0.0.7", port=23456, run_id="123456")


def test_run_on_one_node_stays_alone_inside_a_job_of_slurm():
    assert find_node(1, STEP) == ALONE


@pytest.mark.parametrize("environment", [{}, STEP], ids=["no step", "step on two"])
def test_run_on_more_nodes_than_it_was_started_on_is_refused(environment):
    with pytest.raises(UserError, match=r"hardware\.nodes = 3: this run was started on \d node"):
        find_node(3, environment)


def test_every_node_but_the_first_follows():
    steps = [STEP | {"SLURM_NODEID": str(node)} for node in range(2)]
    assert [follows(step) for step in [*steps, {}]] == [False, True, False]


def launch_on_two_nodes(*arguments, processes, log):
    with reserved_ports(1, among=range(FIRST_PORT, FIRST_PORT + PORTS)) as (port,):
        return launch_at(port, *arguments, processes=processes, log=log)


def launch_at(port, *arguments, processes, log):
    """Start the workers of two nodes, which share the log; return the launchers' exit status."""
    stage = [preloaded_python(), "-m", "tests.support.launcher", str(processes), *arguments]
    step = STEP | {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_JOB_ID": str(port - FIRST_PORT)}
    launchers = [
        subprocess.Popen(
            [*stage, "--nodes", "2", "--log", str(log)],
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | SETTLED | step | {"SLURM_NODEID": str(node)},
        )
        for node in range(2)
    ]
    return [launcher.wait() for launcher in launchers]


def test_launchers_of_two_nodes_start_one_world(tmp_path):
    log = tmp_path / "logs" / "stage.log"
    assert launch_on_two_nodes("note", str(tmp_path), processes=4, log=log) == [0, 0]
    notes = {path.name: path.read_text().split()[:2] for path in tmp_path.glob("[0-9]")}
    assert notes == {"0": ["4", "0"], "1": ["4", "1"], "2": ["4", "0"], "3": ["4", "1"]}


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [("die in 1", "killed by SIGKILL ..."), ("sleep in 1", "process 1 of 2 hangs in step 4: ")],
)
def test_cause_is_told_of_the_node_where_it_happened(tmp_path, behaviour, cause):
    """The other node says that it lost a process, or waits for one; it does not blame a process of
    its own."""
    log = tmp_path / "stage.log"
    assert launch_on_two_nodes(behaviour, str(tmp_path), processes=2, log=log) == [1, 1]
    (message,) = failure_causes(tmp_path, since=0)
    assert message.startswith(f"{log}: {cause}")
    assert "process 1 of 2, the first to fail" in message
    noticed = (
        "Connection (closed|reset) by peer|all processes of this machine wait for those of others"
    )
    assert re.search(f"ERROR lost another process: .*({noticed})", log.read_text())
    assert "process 0 of 2, the first to fail" not in log.read_text()


def test_file_of_the_workflow_is_named_as_a_shell_finds_it(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert shipped_path("envs/gguf.txt") == "envs/gguf.txt"
    monkeypatch.chdir(tmp_path)
    assert shipped_path("envs/gguf.txt") == shlex.quote(str(ROOT / "envs" / "gguf.txt"))
    assert shipped_path("envs/no.txt") == "envs/no.txt of the workflow's repository"
