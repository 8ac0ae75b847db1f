"""The live view shows every logged step once, whatever ended the run before, and sends nothing
unasked."""

import importlib.util
import json
import os
import struct
import subprocess
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event

from tests.support.finished import finished
from workflow.lib.settings.tracking import TrackingConfig
from workflow.lib.system.artifact_files import read_lines
from workflow.lib.system.errors import UserError
from workflow.lib.training.live_view import check_tracking, live_view
from workflow.scripts import finetune


def row(step, *, loss=0.0):
    return {"step": step, "loss": loss or 1.0 / step, "peak_bytes": 2**30, "elapsed_s": 0.5 * step}


def events(folder):
    """Read all event files: records of a length, its checksum, the event, and its checksum."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            found.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return found


def points(folder, tag):
    values = [(event.step, value) for event in events(folder) for value in event.summary.value]
    return [(step, value.simple_value) for step, value in values if value.tag == tag]


def watch(folder, *, before, after):
    with live_view(
        TrackingConfig(), folder=folder, run="demo", identity="demo-0", rows=before, config={}
    ) as show:
        for line in after:
            show(line)


def test_every_logged_step_of_a_training_is_a_point(shared_folder):
    run = finished(shared_folder)
    rows = read_lines(run / "finetune" / "metrics.jsonl")
    for name in ("loss", "grad_norm", "learning_rate", "tokens_per_s", "peak_bytes"):
        drawn = points(run / "tensorboard" / "demo", f"training/{name}")
        assert [step for step, _ in drawn] == [1, 3, 6]
        # the format holds 32-bit numbers
        assert [value for _, value in drawn] == pytest.approx([r[name] for r in rows], rel=1e-6)


def test_resuming_neither_doubles_nor_loses_a_point(tmp_path):
    """Killed after step 5 with a checkpoint of step 3; the journal then goes back to step 3."""
    watch(tmp_path, before=[], after=[row(step, loss=9.0) for step in range(1, 6)])
    watch(tmp_path, before=[row(step) for step in (1, 2, 3)], after=[row(4), row(5), row(6)])
    drawn = points(tmp_path / "tensorboard" / "demo", "training/loss")
    assert [step for step, _ in drawn] == list(range(1, 7))
    assert [value for _, value in drawn] == pytest.approx([1.0 / n for n in range(1, 7)], rel=1e-6)


def test_open_tensorboard_is_told_to_forget_what_it_read_before(tmp_path):
    watch(tmp_path, before=[row(1)], after=[row(2)])
    marks = [e for e in events(tmp_path / "tensorboard" / "demo") if e.HasField("session_log")]
    assert [mark.step for mark in marks] == [0]


def test_time_of_an_interruption_is_not_in_the_curve(tmp_path):
    watch(tmp_path, before=[row(1), row(2)], after=[row(3)])
    times = [e.wall_time for e in events(tmp_path / "tensorboard" / "demo") if e.summary.value]
    assert times[-1] - times[0] == pytest.approx(1.0, abs=1e-3)


def test_switched_off_nothing_is_written(tmp_path):
    off = TrackingConfig(tensorboard=False)
    with live_view(off, folder=tmp_path, run="a", identity="a", rows=[], config={}) as show:
        show(row(1))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_sent_by_default():
    assert TrackingConfig().wandb_project is None


def test_project_without_a_key_is_refused_before_anything_is_sent():
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        pytest.skip("this environment is set up for Weights & Biases")
    with pytest.raises(UserError, match="no WANDB_API_KEY in the environment"):
        check_tracking(TrackingConfig(wandb_project="mine"))


def test_missing_package_is_told_before_any_process_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(finetune, "launch_workers", lambda *_, **__: pytest.fail("it was started"))
    folders = [
        "--base",
        ".",
        "--tokens",
        ".",
        "--preflight",
        ".",
        "--checkpoints",
        ".",
        "--output",
        str(tmp_path),
    ]
    tracking = json.dumps({"tracking": {"tensorboard": True}})
    line = ["--config", "{}", "--run", "demo", *folders, "--tracking", tracking]
    args = finetune.command_line(None).parse_args(line)
    with pytest.raises(
        UserError, match=r"tracking.tensorboard = True: the package tensorboardX is not"
    ):
        finetune.main(args)


ONE_START = """
import sys
from pathlib import Path
from workflow.lib.training.live_view import live_view
from workflow.lib.settings.tracking import TrackingConfig
rows = [{"step": step, "loss": 1.0 / step, "elapsed_s": step} for step in range(1, 4)]
settings = TrackingConfig(tensorboard=False, wandb_project="mine")
run = {"run": "demo", "identity": "demo-0", "config": {"lora": {"r": 4}}}
with live_view(settings, folder=Path(sys.argv[1]), rows=rows[:2], **run) as show:
    show(rows[2])
"""


def test_weights_and_biases_gets_the_steps_under_the_runs_identity(tmp_path):
    """Its own offline mode, in its own process: a file that `wandb sync` would send."""
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", ONE_START, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("wandb/offline-run-*/run-demo-0.wandb")
    content = written.read_bytes()
    assert content.count(b"0.3333333333333333") >= 1
    assert b"mine" in content
    assert done.stdout == ""
