"""Starting workers: what the user is told when one fails, and that none outlives the launcher."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from tests.support.preloaded_python import SETTLED, preloaded_python
from tests.support.refusals import refusal
from workflow.lib.distributed.world import die_with_launcher
from workflow.lib.system.environment import LAUNCHER_VARIABLE
from workflow.lib.system.errors import BatchMemoryError, StoppedError, UserError
from workflow.lib.training.launch import (
    Workers,
    launch_workers,
    stop_on_signals,
    worker_environment,
)

WORKER = "tests.support.launch_worker"
TIMEOUT_S = 600.0  # of what takes moments, on a busy machine


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory):
    """The folder for temporary files of the launchers of a test, in which none may leave any."""
    folder = tmp_path_factory.mktemp("temporary")
    with mock.patch.object(tempfile, "tempdir", str(folder)):
        yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def _forked(monkeypatch):
    """Have workers forked from a process that has imported their packages. Those of tests about the
    death of a launcher, or about Python's exit, are started as a user's are."""
    monkeypatch.setattr(sys, "executable", preloaded_python())
    monkeypatch.setenv("HF_HUB_OFFLINE", SETTLED["HF_HUB_OFFLINE"])


forked = pytest.mark.usefixtures("_forked")


@forked
def test_workers_get_their_ranks_and_share_the_threads_of_the_job(tmp_path, monkeypatch):
    """Snakemake sets both variables to the threads of the rule, for every job."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    launch_workers(Workers(WORKER, ["note", str(tmp_path)], processes=3))
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {str(rank): f"3 {rank} 2 2" for rank in range(3)}
    assert os.environ["OMP_NUM_THREADS"] == "7", "the next workers may be of another number"


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("given", "processes", "threads"),
    [(None, 1, CORES), ("", 1, CORES), (None, 4 * CORES, 1), ("2", 3, 1), ("9,2", 3, 3)],
)
def test_processes_of_a_job_share_its_threads_or_the_cores(monkeypatch, given, processes, threads):
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    found = worker_environment(processes, grace_s=60, deterministic=False)
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == (str(threads), str(threads))


# Prints the page faults of ten rounds over 64 MiB after the first, in blocks like activations.
ROUNDS = """
from resource import RUSAGE_SELF, getrusage
def fill():
    [bytearray(8 << 20) for _ in range(8)]
fill()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(10):
    fill()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


def test_workers_keep_freed_memory_for_the_next_step():
    variables = worker_environment(1, grace_s=60, deterministic=False)
    command = [sys.executable, "-c", ROUNDS]
    faults = subprocess.check_output(command, env=os.environ | variables, text=True)
    assert int(faults) < (64 << 20) // os.sysconf("SC_PAGE_SIZE"), "fewer than of one round"


# What process 1 of 2 does, and the first line that the user sees. `test_failure_causes` has what
# else a worker may say.
CAUSES = {
    "leave 1": "exit status 3; its message stands above",
    "lose a peer in 0, kill 1": "killed by SIGKILL",
    "fail with memory": "out of host memory: preflight predicted a peak of",
    "fail with data": "killed by SIGBUS: a file that it reads by memory map was cut, or "
    "its disk failed",
    "fail in 1, told to end while it says why": "ToldToEndError: a message that is whole",
}


@forked
@pytest.mark.parametrize(("behaviour", "cause"), CAUSES.items(), ids=CAUSES)
def test_first_line_is_the_cause_on_the_process_that_failed_on_its_own_account(
    tmp_path, behaviour, cause
):
    message = failure(behaviour, tmp_path)
    assert_names_process_1(message, cause)
    if behaviour == "fail with memory":
        assert_shows_prediction_measurement_and_change(message)


def test_worker_that_fails_where_its_own_exit_would_wait_is_named(tmp_path):
    assert_names_process_1(
        failure("fail in 1 beside a collective", tmp_path), "KeyError: 'a defect'"
    )


def failure(behaviour, folder):
    """Return what the user sees, at once: the other process would sleep for an hour."""
    return refusal(launch_workers, Workers(WORKER, [behaviour, str(folder)], processes=2))


def assert_names_process_1(message, cause):
    lines = message.splitlines()
    assert lines[0].startswith(cause)
    assert lines[-1].startswith("(training: process 1 of 2, the first to fail;")
    assert "Repeat the command to continue from what is finished" in lines[-1]


@forked
def test_batch_that_was_too_large_is_named_by_its_size(tmp_path):
    with pytest.raises(BatchMemoryError) as caught:
        launch_workers(Workers(WORKER, ["fail with batch", str(tmp_path)], processes=2))
    assert caught.value.size == 6


def assert_shows_prediction_measurement_and_change(message):
    assert "3.00 GiB had been in use" in message
    assert "Set train.micro_batch_size = 1 (predicted peak 1.50 GiB)" in message
    assert "adam_moments" in message, "preflight's table"


def hang(behaviour, folder, temporary):
    """Return what the user sees. The launcher is a process of its own: it ends all its children,
    and those of this one serve other tests."""
    done = subprocess.run(
        [preloaded_python(), "-m", "tests.support.launcher", "2", behaviour, str(folder)],
        env=os.environ | SETTLED | {"TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr[done.stderr.index("process 1 of 2 hangs") :]


@pytest.mark.parametrize(
    ("behaviour", "state"),
    [
        ("stop 1", r"does not run \(no sign of life for"),
        ("sleep in 1", r"is at command\.py:\d+ work -> launch_worker\.py:\d+ oversleep"),
    ],
)
def test_process_that_hangs_is_named_and_all_are_stopped(tmp_path, temporary, behaviour, state):
    """Stopped as a whole, or asleep on the way to a collective that the other has begun."""
    message = hang(behaviour, tmp_path, temporary)
    assert message.startswith("process 1 of 2 hangs in step 4: nothing has moved for ")
    assert re.search(f"process 1 of 2 {state}", message)
    assert "the others wait: process 0 is at" in message
    assert "gloo:all_reduce" in message


@pytest.mark.parametrize(
    ("where", "phase"), [("loading", "loading the model"), ("held-out loss", "held-out loss")]
)
def test_process_that_is_stopped_outside_steps_is_named_with_its_phase(
    base, temporary, where, phase
):
    """The bound of the phase itself is far away: a process without a sign of life is found
    before."""
    message = hang(f"stop in {where}", base, temporary)
    assert message.startswith(f"process 1 of 2 hangs in {phase}: nothing has moved for ")
    assert "process 1 of 2 does not run (no sign of life for" in message
    assert "the others wait: process 0 is at" in message


@forked
def test_inputs_are_inspected_once_a_worker_was_killed(tmp_path):
    with pytest.raises(UserError, match=r"^killed by SIGKILL: the tokens folder is damaged"):
        launch_workers(
            Workers(WORKER, ["kill 1", str(tmp_path)], processes=2),
            inspect_inputs=lambda: ["the tokens folder is damaged"],
        )


@forked
def test_workers_that_stopped_as_asked_are_no_failure(tmp_path):
    with pytest.raises(StoppedError):
        launch_workers(Workers(WORKER, ["stopped", str(tmp_path)], processes=2))


def test_signal_that_is_told_twice_stops_once_and_an_ignored_one_stops_nothing():
    """A terminal and Snakemake both tell; torchrun would cut the second time short what the first
    began."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    stop_on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(SignalException, match="SIGINT") as caught:
        signal.raise_signal(signal.SIGINT)
    assert caught.value.sigval == signal.SIGTERM
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.raise_signal(number)


@contextmanager
def launched(folder, temporary):
    """A launcher as a process, whose two workers wait and have told their ids in `folder`."""
    call = f"launch_workers(Workers({WORKER!r}, ['wait', {str(folder)!r}], processes=2))"
    script = f"from workflow.lib.training.launch import Workers, launch_workers; {call}"
    environment = os.environ | {"TMPDIR": str(temporary)}
    launcher = subprocess.Popen([sys.executable, "-c", script], env=environment)
    try:
        for rank in range(2):
            wait_for(folder / str(rank))
        yield launcher
    finally:
        launcher.kill()
        launcher.wait()


def workers_of(folder):
    return [psutil.Process(int((folder / str(rank)).read_text())) for rank in range(2)]


def test_workers_die_with_a_killed_launcher(tmp_path, temporary):
    with launched(tmp_path, temporary) as launcher:
        workers = workers_of(tmp_path)
        assert all(worker.is_running() for worker in workers)
        launcher.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=TIMEOUT_S)
        assert not alive
    for folder in temporary.iterdir():
        shutil.rmtree(folder)


@pytest.mark.parametrize("times", [1, 3])
def test_interrupted_launcher_leaves_no_worker_and_no_file(tmp_path, temporary, times):
    """The fixture `temporary` finds files. Ctrl-C may come once more while the first one works."""
    with launched(tmp_path, temporary) as launcher:
        workers = workers_of(tmp_path)
        for _ in range(times):
            launcher.send_signal(signal.SIGINT)
        assert launcher.wait() != 0
        _, alive = psutil.wait_procs(workers, timeout=TIMEOUT_S)
        assert not alive


def test_worker_whose_launcher_died_before_it_could_ask_for_that_ends():
    """It was importing meanwhile. It would wait for the others for half an hour, and hold the lock
    of the run."""
    for launcher, status in ((os.getpid(), 0), (1, -signal.SIGKILL)):
        worker = os.fork()
        if worker == 0:
            failed = 1
            try:
                os.environ[LAUNCHER_VARIABLE] = str(launcher)
                die_with_launcher()
                failed = 0
            finally:
                os._exit(failed)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == status


def wait_for(path):
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.1)
    return path.read_text()
