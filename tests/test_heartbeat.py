"""Signs of life: when a run counts as hung, and which process is held responsible."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from workflow.lib import heartbeat
from workflow.lib.heartbeat import FOLDER_VARIABLE, Pulse, Watch


def beat(folder: Path, rank: int, **changes: Any) -> None:
    facts = {"rank": rank, "pid": 1, "phase": "step 7", "number": 9, "limit_s": 0.2} | changes
    (folder / f"rank-{rank}.json").write_text(json.dumps(facts))


def looks(watch: Watch, folder: Path, *, beats: dict[int, dict[str, Any]]) -> str | None:
    """Look several times while the processes `beats` go on telling the same."""
    for _ in range(4):
        for rank, changes in beats.items():
            beat(folder, rank, **changes)
        time.sleep(0.1)
        if (verdict := watch.look()) is not None:
            return verdict
    return None


def test_process_that_has_begun_fewer_collectives_is_the_one_that_hangs(tmp_path: Path) -> None:
    waiting = {"collective": {"number": 57, "name": "nccl:all_gather"}, "at": "training.py:9 steps"}
    behind = {"collective": {"number": 56, "name": "nccl:all_reduce"}, "at": "batches.py:4 read"}
    verdict = looks(Watch(tmp_path), tmp_path, beats={0: waiting, 1: behind, 2: waiting})
    assert verdict is not None
    assert verdict.startswith("process 1 of 3 hangs in step 7: nothing has moved for ")
    assert "process 1 of 3 is at batches.py:4 read, last collective nccl:all_reduce #56" in verdict


def test_process_that_goes_on_does_not_hang(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    for number in range(6):
        beat(tmp_path, 0, number=number)
        time.sleep(0.1)
        assert watch.look() is None


def test_machine_that_slept_has_not_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    watch = Watch(tmp_path)
    beat(tmp_path, 0, limit_s=45.0)
    for now in (1.0, 2.0, 3600.0):  # noqa: B007 - read by the clock above
        assert watch.look() is None


def test_pulse_tells_phase_line_and_limit_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step says nothing of how long one takes: it compiles and allocates."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(heartbeat, "LASTING_S", 0.2)
    limits = []
    with Pulse(rank=3, start_s=600.0, step_s=1.0) as pulse:
        for step in range(1, 4):
            pulse.step(step)
            time.sleep(0.5)
            facts = json.loads((tmp_path / "rank-3.json").read_text())
            limits.append(facts["limit_s"])
    assert facts["phase"] == "step 3"
    assert facts["pid"] == os.getpid()
    assert "test_heartbeat.py" in facts["at"]
    assert limits[:2] == [600.0, 600.0]
    assert 5.0 <= limits[2] < 600.0, "ten times the second step"
