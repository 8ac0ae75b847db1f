"""Real runs that Ctrl-C, kills and faults interrupt, and what the repeated command does."""

import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.chaos import TO_TORCHRUN, complete, differences, storm
from tests.support.workflow_project import (
    STEPS,
    TIMEOUT_S,
    Finished,
    Project,
    adapter_bytes,
    run_folders,
)


@dataclass(frozen=True)
class Stopped:
    """What Ctrl-C did."""

    done: Finished
    saved_steps: list[int]


@dataclass(frozen=True)
class Killed:
    """What a command said while training went on without Snakemake, and what the end of that
    training left alive."""

    refused: Finished
    orphans: list[int]
    survivors: list[psutil.Process]


def signal_snakemake_alone(project, *, number, forks_stages):
    """Send a signal to Snakemake's process, not to its group, as `kill` and a scheduler do."""
    after = max(saved_steps(project), default=0)
    process = start_and_wait_for_checkpoint(
        project, after=after, forks_stages=forks_stages, num_steps=UNENDING
    )
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert [process for process in below if has_not_ended(process)] == [], "it waits for its jobs"
    return Stopped(Finished(process.returncode, output), saved_steps(project, num_steps=UNENDING))


def has_not_ended(process):
    """Whether a process runs; one that has ended may wait for init to reap it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True)
class Interrupted:
    """A run that was stopped by Ctrl-C, then killed, then repeated to its end."""

    project: Project
    stopped: Stopped
    killed: Killed
    repeated: Finished


def saved_steps(project, *, num_steps=STEPS):
    folders = run_folders(project, num_steps=num_steps)
    return sorted(int(path.name[5:]) for folder in folders for path in folder.glob("step-*"))


def start_and_wait_for_checkpoint(project, *, after, forks_stages=False, num_steps=STEPS):
    """Start training; return when a checkpoint of a later step than `after` is there."""
    process = project.start("train", forks_stages=forks_stages)
    deadline = time.monotonic() + TIMEOUT_S
    while max(saved_steps(project, num_steps=num_steps), default=0) <= after:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    return process


def press_ctrl_c(project):
    process = start_and_wait_for_checkpoint(project, after=0)
    os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to the whole group
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return Stopped(Finished(process.returncode, output), saved_steps(project))


def kill(project, *, after):
    """Kill Snakemake alone, as when memory runs out; repeat the command; then kill what Snakemake
    had started."""
    process = start_and_wait_for_checkpoint(project, after=after)
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()  # a group that is stopped when its parent ends is sent SIGHUP by the kernel
    for orphan in below:
        orphan.suspend()  # so that the training cannot end before the command is repeated
    refused = project.snakemake("train")
    os.killpg(process.pid, signal.SIGKILL)  # the launcher; the workers are in groups of their own
    process.communicate()
    _, survivors = psutil.wait_procs(below, timeout=TIMEOUT_S)
    for survivor in survivors:
        survivor.kill()
    return Killed(refused, [orphan.pid for orphan in below], survivors)


def ready_to_train(finished_project, root, *, processes=2):
    """A project with tokens and base, whose training is still to come.

    processes: two as in the finished one, for the same bytes; one starts sooner."""
    project = finished_project.copy(root)
    for folder in ("checkpoints", "runs/demo/finetune", "runs/demo/consolidate"):
        shutil.rmtree(project.root / "results" / folder)
    project.edit({"hardware": {"cpu_processes": processes}})
    return project


@pytest.fixture(scope="module")
def interrupted(finished_project, tmp_path_factory):
    project = ready_to_train(finished_project, tmp_path_factory.mktemp("run") / "interrupted")
    stopped = press_ctrl_c(project)
    killed = kill(project, after=max(stopped.saved_steps))
    return Interrupted(project, stopped, killed, project.run("train"))


def test_ctrl_c_stops_before_the_training_has_ended(interrupted):
    assert interrupted.stopped.done.status != 0
    assert interrupted.stopped.saved_steps[-1] < STEPS


def test_ctrl_c_leaves_a_checkpoint_of_the_step_it_stopped_at(interrupted):
    output = interrupted.stopped.done.output
    assert f"stopped after step {interrupted.stopped.saved_steps[-1]} of {STEPS}" in output
    assert "Traceback" not in output


UNENDING = 20_000  # steps of a training that is stopped: a busy machine sends the signal late

# Signal, what Ctrl-C does to a process that is started there (a script's `&` has it ignored), and
# whether stages are forked: by the first case they stop in order that are started as a user's are.
ALONE = {
    "SIGTERM": (signal.SIGTERM, signal.default_int_handler, False),
    "SIGINT": (signal.SIGINT, signal.default_int_handler, True),
    "SIGTERM in the background": (signal.SIGTERM, signal.SIG_IGN, True),
}


@pytest.mark.parametrize(("number", "ctrl_c", "forks_stages"), ALONE.values(), ids=ALONE)
def test_signal_to_snakemake_alone_ends_the_training_with_a_checkpoint(
    finished_project, tmp_path, number, ctrl_c, forks_stages
):
    project = ready_to_train(finished_project, tmp_path / "project", processes=1)
    project.edit({"train": {"max_steps": UNENDING}})
    before = signal.signal(signal.SIGINT, ctrl_c)
    try:
        stopped = signal_snakemake_alone(project, number=number, forks_stages=forks_stages)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_stopped_in_order(stopped)


def assert_stopped_in_order(stopped):
    assert stopped.done.status == 1, stopped.done.output
    assert "Traceback" not in stopped.done.output
    last = stopped.saved_steps[-1]
    assert last < UNENDING
    assert f"stopped after step {last} of {UNENDING}" in stopped.done.output
    said = "logs/finetune/demo.log: training was stopped by a signal; the same command continues"
    assert said in stopped.done.output


def test_command_repeated_while_an_orphan_trains_names_its_process(interrupted):
    refused = interrupted.killed.refused
    assert refused.status == 1
    assert "Traceback" not in refused.output
    named = re.findall(r"process (\d+) is training this run", refused.output)
    assert named
    assert {int(pid) for pid in named} <= set(interrupted.killed.orphans)


def test_no_worker_outlives_its_launcher(interrupted):
    assert interrupted.killed.survivors == []


def test_same_command_continues_after_ctrl_c_and_after_a_kill(interrupted):
    resumed = interrupted.project.json("finetune", "summary.json")["resumed_from_steps"]
    assert len(resumed) == 2
    assert interrupted.stopped.saved_steps[-1] == resumed[0] < resumed[1] < STEPS


def test_command_repeated_after_a_kill_tells_how_far_training_had_come(interrupted):
    """After Ctrl-C it does not: that was told."""
    told = (
        r"the training before this one \(process \d+\) was killed after step (\d+); its newest "
        r"checkpoint is that of step (\d+)"
    )
    ((reached, newest),) = re.findall(told, interrupted.repeated.output)
    _, resumed = interrupted.project.json("finetune", "summary.json")["resumed_from_steps"]
    assert int(reached) >= int(newest) == resumed
    assert "was killed after" not in interrupted.killed.refused.output


def test_metrics_of_an_interrupted_run_have_every_step_once(interrupted):
    lines = (interrupted.project.folder("finetune") / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def test_interrupted_run_ends_with_the_bytes_of_an_undisturbed_one(interrupted, finished_project):
    assert adapter_bytes(interrupted.project) == adapter_bytes(finished_project)


def test_three_faults_at_random_moments_change_no_artifact(finished_project, tmp_path):
    project = ready_to_train(finished_project, tmp_path / "project")
    found = list(storm(project, "train", most=3, chance=random.Random(11)))
    complete(project, "train")
    assert found
    for fault, said in found:
        assert "Traceback" not in said
        assert fault != TO_TORCHRUN or "the stage ended without a word" in said
    assert differences(project, finished_project) == []


def test_cause_of_a_failed_training_stands_at_the_end_of_the_terminals_output(
    finished_project, tmp_path
):
    """Broken by a rate that no adapter survives; the message is the last thing that the user
    sees."""
    project = ready_to_train(finished_project, tmp_path / "project", processes=1)
    rate = {"learning_rate": 1.0, "max_grad_norm": None, "adam_beta2": 0.0}
    project.edit({"train": rate, "lora": {"alpha": 65536.0}})
    done = project.snakemake("train")
    assert done.status == 1, done.output
    end = done.output.splitlines()[-6:]
    (said,) = [line for line in end if line.startswith("logs/finetune/demo.log: step ")]
    assert "the updates have broken the model. Lower train.learning_rate" in said
    assert "Repeat the command to continue from what is finished" in said
    assert "Traceback" not in done.output
