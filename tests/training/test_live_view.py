"""The live view shows every logged step once, whatever ended the run before, and sends nothing
unasked."""

import importlib.util
import json
import os
import socket
import sqlite3
import struct
import subprocess
import sys

import pytest
from tensorboardX.proto.event_pb2 import Event

from tests.support.finished import finished
from tests.support.forked_stage import command_line
from workflow.lib.settings.tracking import TrackingConfig
from workflow.lib.system.checksums import read_lines
from workflow.lib.system.errors import UserError
from workflow.lib.training.live_view import TRACKERS, Shown, check_tracking, curves, live_view
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
    with live_view(TrackingConfig(), Shown(folder, "demo", "demo-0", before, {})) as show:
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
    with live_view(off, Shown(tmp_path, "a", "a", [], {})) as show:
        show(row(1))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_sent_by_default():
    on = [tracker.setting for tracker in TRACKERS if tracker.value(TrackingConfig())]
    assert on == ["tensorboard"]


def test_held_out_losses_of_several_sources_are_curves_that_every_tracker_can_name():
    measured = row(1) | {"heldout_losses": {"data/chats?.jsonl": 2.5, "code": 3.0}}
    found = curves(measured)
    assert found["heldout_loss/data_chats_.jsonl"] == 2.5
    assert found["heldout_loss/code"] == 3.0


def test_project_without_a_key_is_refused_before_anything_is_sent():
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        pytest.skip("this environment is set up for Weights & Biases")
    with pytest.raises(UserError, match="no WANDB_API_KEY in the environment"):
        check_tracking(TrackingConfig(wandb_project="mine"))


def test_missing_package_is_told_before_any_process_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(finetune, "launch_workers", lambda *_, **__: pytest.fail("it was started"))
    places = dict.fromkeys(("base", "tokens", "preflight", "checkpoints", "output"), tmp_path)
    tracking = {"tracking": {"tensorboard": True}}
    line = command_line({"config": tracking, "run": "demo"} | places)
    args = finetune.command_line(None).parse_args(line)
    with pytest.raises(
        UserError, match=r"tracking.tensorboard = true: the package tensorboardX is not"
    ):
        finetune.main(args)


ONE_START = """
import sys
from pathlib import Path
from workflow.lib.training.live_view import Shown, live_view
from workflow.lib.settings.tracking import TrackingConfig
folder, setting, *steps = sys.argv[1:]
known, last = map(int, steps)
rows = [{"step": step, "loss": 1.0 / step, "elapsed_s": step} for step in range(1, last + 1)]
settings = TrackingConfig(tensorboard=False, **{setting: "mine"})
shown = Shown(Path(folder), "demo", "demo-0", rows[:known], {"lora": {"r": 4}})
with live_view(settings, shown) as show:
    for row in rows[known:]:
        show(row)
"""


def one_start(folder, setting, *, known, last, **environment):
    """Show steps up to `last`, of which `known` are in the journal, by a process of its own."""
    command = [sys.executable, "-c", ONE_START, str(folder), setting, str(known), str(last)]
    environment = os.environ | {"HOME": str(folder)} | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def points_of_mlflow(folder):
    with sqlite3.connect(folder / "mlflow" / "mlflow.db") as database:
        return database.execute("SELECT step, value FROM metrics WHERE key = 'loss'").fetchall()


def points_of_trackio(folder):
    with sqlite3.connect(folder / "trackio" / "mine.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    return [(step, json.loads(metrics)["loss"]) for step, metrics in rows]


@pytest.mark.parametrize(
    ("setting", "points"),
    [("mlflow_experiment", points_of_mlflow), ("trackio_project", points_of_trackio)],
)
def test_tracker_gets_every_step_once_also_of_a_run_that_was_killed(setting, points, tmp_path):
    """Killed after step 3 with a checkpoint of step 2."""
    one_start(tmp_path, setting, known=0, last=3)
    one_start(tmp_path, setting, known=2, last=5)
    found = sorted(points(tmp_path))
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert [loss for _, loss in found] == pytest.approx([1.0 / step for step in range(1, 6)])


def test_server_that_is_not_there_is_told_by_the_setting(tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        command = [sys.executable, "-c", ONE_START, str(tmp_path), "mlflow_experiment", "0", "1"]
        environment = {"MLFLOW_TRACKING_URI": address, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | environment
        )
    assert "tracking.mlflow_experiment = 'mine': mlflow refuses the run" in done.stderr


def test_weights_and_biases_gets_the_steps_under_the_runs_identity(tmp_path):
    """Its own offline mode, in its own process: a file that `wandb sync` would send."""
    done = one_start(tmp_path, "wandb_project", known=2, last=3, WANDB_MODE="offline")
    (written,) = tmp_path.glob("wandb/offline-run-*/run-demo-0.wandb")
    content = written.read_bytes()
    assert content.count(b"0.3333333333333333") >= 1
    assert b"mine" in content
    assert done.stdout == ""
