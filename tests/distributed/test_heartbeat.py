"""Signs of life: when a run counts as hung, and which process is held responsible."""

import itertools
import json
import os
import subprocess
import time
from contextlib import contextmanager

import psutil
import pytest
import torch

from workflow.lib.distributed import heartbeat
from workflow.lib.distributed.heartbeat import FOLDER_VARIABLE, Pulse, Watch
from workflow.lib.evaluation.evaluated_models import watched
from workflow.lib.evaluation.questions import Subject


class Clock:
    """The clock of the watch, which only the test moves on: a busy machine does not."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(heartbeat, "time", made)
    return made


BEATS = itertools.count(1)


def beat(folder, rank, **changes):
    facts = {
        "rank": rank,
        "pid": os.getpid(),
        "phase": "step 7",
        "number": 9,
        "moves": 0,
        "limit_s": 0.2,
        "silent_s": 60.0,
    } | changes
    path = folder / f"rank-{rank}.json"
    path.write_text(json.dumps(facts))
    os.utime(path, ns=(0, next(BEATS)))  # two writes may be too near for the disk's clock


def looks(watch, folder, clock, *, beats):
    """Look several times while the processes `beats` go on telling the same."""
    for _ in range(4):
        for rank, changes in beats.items():
            beat(folder, rank, **changes)
        clock.sleep(0.1)
        if (verdict := watch.look()) is not None:
            return verdict
    return None


def test_process_that_has_begun_fewer_collectives_is_the_one_that_hangs(tmp_path, clock):
    waiting = {"collective": [57, "nccl:all_gather"], "at": "training.py:9 steps"}
    behind = {"collective": [56, "nccl:all_reduce"], "at": "batches.py:4 read"}
    verdict = looks(
        Watch(tmp_path, ranks=range(3), size=3),
        tmp_path,
        clock,
        beats={0: waiting, 1: behind, 2: waiting},
    )
    assert verdict.startswith("process 1 of 3 hangs in step 7: nothing has moved for ")
    assert "process 1 of 3 is at batches.py:4 read, last collective nccl:all_reduce #56" in verdict


@pytest.mark.parametrize("progress", ["number", "moves"])
def test_process_that_goes_on_does_not_hang(tmp_path, clock, progress):
    """From phase to phase, or within one."""
    watch = Watch(tmp_path, ranks=range(1), size=1)
    for number in range(6):
        beat(tmp_path, 0, **{progress: number})
        clock.sleep(0.1)
        assert watch.look() is None


def test_process_that_waits_for_one_that_works_does_not_hang(tmp_path, clock):
    watch = Watch(tmp_path, ranks=range(2), size=2)
    waiting = {"waits": True, "at": "heldout.py:9 gather"}
    assert looks(watch, tmp_path, clock, beats={0: waiting, 1: {"limit_s": 60.0}}) is None
    verdict = looks(watch, tmp_path, clock, beats={0: waiting, 1: {"limit_s": 0.2}})
    assert verdict.startswith("process 1 of 2 hangs in step 7")


def test_processes_that_wait_for_another_machine_are_not_blamed(tmp_path, clock):
    """Of a run of 4 this machine starts 2; a process that waits for its GPU may be in the same
    place, unseen."""
    watch = Watch(tmp_path, ranks=range(2), size=4)
    waiting = {"waits": True, "at": "training.py:9 steps"}
    verdict = looks(watch, tmp_path, clock, beats={0: waiting, 1: waiting})
    assert verdict.startswith(f"{heartbeat.WAITING}: nothing has moved for ")
    assert "process 1 is at training.py:9 steps" in verdict
    verdict = looks(watch, tmp_path, clock, beats={0: waiting, 1: {}})
    assert verdict.startswith("process 1 of 4 hangs in step 7")
    assert "If another machine says the same of its own" in verdict


def test_process_without_a_sign_of_life_hangs_whatever_its_phase_may_take(
    tmp_path, clock, monkeypatch
):
    watch = Watch(tmp_path, ranks=range(2), size=2)
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.2)
    beat(tmp_path, 1, phase="loading the model", limit_s=600.0, silent_s=0.25)
    verdict = looks(watch, tmp_path, clock, beats={0: {"limit_s": 600.0}})
    assert verdict.startswith("process 1 of 2 hangs in loading the model")


def test_process_that_has_ended_does_not_hang(tmp_path, clock):
    """A cause of its own is known by then, or it left in order."""
    ended = subprocess.Popen(["true"])
    deadline = time.monotonic() + 600
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    watch = Watch(tmp_path, ranks=range(1), size=1)
    assert looks(watch, tmp_path, clock, beats={0: {"pid": ended.pid}}) is None
    ended.wait()


def test_process_that_never_begins_is_named_when_the_others_have_waited_long_enough(
    tmp_path, clock
):
    watch = Watch(tmp_path, ranks=range(2, 4), size=4)
    joining = {"phase": heartbeat.JOINING, "waits": True}
    verdict = looks(watch, tmp_path, clock, beats={2: joining})
    assert verdict.startswith("process 3 of 4 hangs before it has begun")


def test_machine_that_slept_has_not_hung(tmp_path, clock):
    watch = Watch(tmp_path, ranks=range(3), size=3)
    beat(tmp_path, 0, limit_s=45.0)
    for clock.now_s in (1.0, 2.0, 3600.0):
        assert watch.look() is None


def test_bound_of_a_phase_follows_from_its_bytes_and_from_the_steps(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))

    def limit_s():
        return json.loads((tmp_path / "rank-0.json").read_text())["limit_s"]

    with Pulse(rank=0, start_s=600.0, step_s=1.0, quiet_s=2.0) as pulse:
        pulse.phase("loading the model", num_bytes=50_000_000)
        assert limit_s() == 2.0 + 5.0
        pulse.step(1)
        time.sleep(0.4)  # at least
        pulse.phase("held-out loss")
        assert limit_s() > 10 * 0.4, "a pass takes no longer than a step"
    assert not list(tmp_path.glob("rank-*")), "who has left holds up nobody"


def test_evaluation_tells_what_it_loads_and_every_forward_pass(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    told = []

    def facts():
        found = json.loads((tmp_path / "rank-0.json").read_text())
        return found["phase"], found["moves"]

    @contextmanager
    def opened():
        told.append(facts())
        yield torch.nn.Linear(3, 2)

    with Pulse(rank=0, start_s=600.0, step_s=600.0) as pulse:
        subject = watched(Subject("tuned", "key", opened), pulse=pulse, folders=[tmp_path])
        with subject.opened() as model:
            for _ in range(3):
                model(torch.ones(1, 3))
            pulse.phase("done")
            told.append(facts())
    assert told == [("loading tuned", 0), ("done", 3)]


def test_pulse_tells_phase_line_and_limit_of_a_step(tmp_path, monkeypatch):
    """The first step says nothing of how long one takes: it compiles and allocates."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(heartbeat, "LASTING_S", 0.2)
    limits = []

    def facts():
        return json.loads((tmp_path / "rank-3.json").read_text())

    with Pulse(rank=3, start_s=600.0, step_s=1.0) as pulse:
        for step in range(1, 4):
            pulse.step(step)
            limits.append(facts()["limit_s"])
            while facts()["at"] is None:  # a beat tells it, once the step has lasted
                time.sleep(0.05)
        told = facts()
    assert told["phase"] == "step 3"
    assert told["pid"] == os.getpid()
    assert "test_heartbeat.py" in told["at"]
    assert limits[:2] == [600.0, 600.0]
    assert 2.0 <= limits[2] < 600.0, "ten times the second step"
