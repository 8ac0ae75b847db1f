"""A run on GPUs that was killed and stopped ends with the bytes of an undisturbed one, with
`train.deterministic`.

Continued by another number of GPUs its losses are those of an undisturbed one, up to rounding."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from tests.gpu import test_stages
from tests.support.forked_stage import command_line
from tests.support.settings_examples import demo_runs
from workflow.lib.artifacts.checkpoint_folder import saved_steps
from workflow.lib.system.files import read_checked_json

pytestmark = pytest.mark.gpu

STEPS = 30
TRAIN = {"epochs": None, "max_steps": STEPS, "checkpoint_every_steps": 3, "deterministic": True}
TIMES = {"tokens_per_s", "elapsed_s", "peak_bytes", "sha256"}
EXACT = {"model": {"compute_dtype": "float32"}, "train": TRAIN}
RUNS = demo_runs({"gpu": {"train": TRAIN}, "exact": EXACT})


def prepare(folder, run):
    return test_stages.prepare(folder, of=RUNS[run], run=run)


def finetune(folder, run="gpu", **inputs):
    """Return the command that trains into `folder`."""
    module = [sys.executable, "-m", "workflow.scripts.finetune"]
    settings = {"config": test_stages.settings_of_stage("finetune", RUNS[run]), "run": run}
    places = {"checkpoints": folder / "checkpoints", "output": folder / "finetune"}
    return [*module, *command_line(settings | inputs | places)]


def interrupt(command, checkpoints, *, number, worker):
    """Start training, wait for two checkpoints more, send a signal to a worker or to the launcher;
    return the exit status."""
    goal = max(saved_steps(checkpoints), default=0) + 5
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 300
    while max(saved_steps(checkpoints), default=0) < goal:
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children()
    os.kill(workers[-1].pid if worker else process.pid, number)
    return process.wait(timeout=120)


def metrics(folder):
    lines = (folder / "finetune" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def adapter(folder):
    return {p.name: p.read_bytes() for p in (folder / "finetune" / "adapter").glob("*.safetensors")}


def test_interrupted_run_on_gpus_ends_with_the_bytes_of_an_undisturbed_one(tmp_path, two_gpus):
    inputs = prepare(tmp_path, "gpu")
    undisturbed, disturbed = (tmp_path / name for name in ("undisturbed", "disturbed"))
    subprocess.run(finetune(undisturbed, **inputs), check=True)
    command = finetune(disturbed, **inputs)
    checkpoints = disturbed / "checkpoints"
    assert interrupt(command, checkpoints, number=signal.SIGKILL, worker=True) == 1
    assert interrupt(command, checkpoints, number=signal.SIGTERM, worker=False) == os.EX_TEMPFAIL
    subprocess.run(command, check=True)
    summary = read_checked_json(disturbed / "finetune" / "summary.json")
    print(json.dumps(summary["resumed_from_steps"]))
    assert len(summary["resumed_from_steps"]) == 2
    assert [row["step"] for row in metrics(disturbed)] == list(range(1, STEPS + 1))
    assert metrics(disturbed) == metrics(undisturbed)
    assert len(adapter(undisturbed)) == summary["processes"] == torch.cuda.device_count()
    assert adapter(disturbed) == adapter(undisturbed)


def test_losses_of_4_then_2_gpus_are_those_of_4(tmp_path, monkeypatch):
    """Stopped on four GPUs, planned anew and continued on two, in float32: sums in another
    order."""
    if torch.cuda.device_count() < 4:
        pytest.skip(f"needs 4 GPUs, this machine shows {torch.cuda.device_count()}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    inputs = prepare(tmp_path, "exact")
    undisturbed, elastic = (tmp_path / name for name in ("undisturbed", "elastic"))
    subprocess.run(finetune(undisturbed, "exact", **inputs), check=True)
    command = finetune(elastic, "exact", **inputs)
    stopped = interrupt(command, elastic / "checkpoints", number=signal.SIGTERM, worker=False)
    assert stopped == os.EX_TEMPFAIL
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    inputs["preflight"] = test_stages.plan(
        tmp_path / "of-two.json", of=RUNS["exact"], run="exact", tokens=inputs["tokens"]
    )
    subprocess.run(finetune(elastic, "exact", **inputs), check=True)
    summary = read_checked_json(elastic / "finetune" / "summary.json")
    assert summary["processes"] == 2
    assert len(summary["resumed_from_steps"]) == 1
    losses, expected = ([row["loss"] for row in metrics(x)] for x in (elastic, undisturbed))
    print(json.dumps({"losses": losses, "of four alone": expected}))
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, rel=1e-4)
