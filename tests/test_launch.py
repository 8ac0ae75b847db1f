"""Starting workers: what the user is told when one fails, and that none outlives the launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from workflow.lib.errors import StoppedError, UserError
from workflow.lib.launch import launch_workers

WORKER = "tests.launch_worker"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    for name in ("OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_workers_get_their_ranks_and_share_the_cores(tmp_path: Path) -> None:
    launch_workers(WORKER, ["note", str(tmp_path)], processes=3)
    threads = max(1, (os.cpu_count() or 1) // 3)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        str(rank): f"3 {rank} {threads}" for rank in range(3)
    }


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [("raise in 1", "exit status 1"), ("kill 1", "killed by SIGKILL")],
)
def test_failure_names_the_process_that_failed_first_and_why(
    tmp_path: Path, behaviour: str, cause: str
) -> None:
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        launch_workers(WORKER, [behaviour, str(tmp_path)], processes=2)
    assert str(caught.value) == (
        f"training stopped: process 1 of 2 failed first ({cause}); its message stands above and in the log. "
        "Repeat the command to continue from what is finished."
    )
    assert time.monotonic() - began < 45, "the other process, asleep, is not waited for"


def test_workers_that_stopped_as_asked_are_no_failure(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        launch_workers(WORKER, ["stopped", str(tmp_path)], processes=2)


def test_workers_die_with_a_killed_launcher(tmp_path: Path) -> None:
    call = f"launch_workers({WORKER!r}, ['wait', {str(tmp_path)!r}], processes=2)"
    script = f"from workflow.lib.launch import launch_workers; {call}"
    launcher = subprocess.Popen([sys.executable, "-c", script])
    try:
        workers = [psutil.Process(int(wait_for(tmp_path / str(rank)))) for rank in range(2)]
        assert all(worker.is_running() for worker in workers)
        launcher.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert not alive
    finally:
        launcher.kill()
        launcher.wait()


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.1)
    return path.read_text()
