"""A run on GPUs that was killed and stopped ends with the bytes of an undisturbed one, with `train.deterministic`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_stages import stage
from workflow.lib import runs
from workflow.lib.checkpoint import saved_steps
from workflow.lib.config import load_config

pytestmark = pytest.mark.gpu

STEPS = 30
TRAIN = {"epochs": None, "max_steps": STEPS, "checkpoint_every_steps": 3, "deterministic": True}
TIMES = {"tokens_per_s", "elapsed_s", "peak_bytes"}
_, RUNS = load_config({"runs": {"gpu": {"train": TRAIN}}})


def config(name: str) -> str:
    return runs.stage_json(name, RUNS["gpu"])


def finetune(folder: Path, *, base: Path, tokens: Path, preflight: Path) -> list[str]:
    """Return the command that trains into `folder`."""
    return [
        *(sys.executable, "-m", "workflow.scripts.finetune", "--config", config("finetune"), "--run", "gpu"),
        *("--base", str(base), "--tokens", str(tokens), "--preflight", str(preflight)),
        *("--checkpoints", str(folder / "checkpoints"), "--output", str(folder / "finetune")),
    ]  # fmt: skip


def children(pid: int) -> list[int]:
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def interrupt(command: list[str], checkpoints: Path, *, number: int, worker: bool) -> int:
    """Start training, wait for two checkpoints more, send a signal to a worker or to the launcher; return the exit status."""
    goal = max(saved_steps(checkpoints), default=0) + 5
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 300
    while max(saved_steps(checkpoints), default=0) < goal:
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    os.kill(children(process.pid)[-1] if worker else process.pid, number)
    return process.wait(timeout=120)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "finetune" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def adapter(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / "finetune" / "adapter").glob("*.safetensors")}


def test_interrupted_run_on_gpus_ends_with_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, two_gpus: int
) -> None:
    inputs = {name: tmp_path / name for name in ("base", "tokens")}
    preflight, model = tmp_path / "preflight.json", Path(RUNS["gpu"].model.source)
    stage("tokenize_dataset", config("tokenize_dataset"),
          "--tokenizer", model, "--output", inputs["tokens"])  # fmt: skip
    stage("preflight_run", config("preflight_run"), "--model", model, "--tokens", inputs["tokens"] / "manifest.json",
          "--output", preflight, "--run", "gpu")  # fmt: skip
    stage("quantize_base", config("quantize_base"), "--model", model, "--output", inputs["base"])
    undisturbed, disturbed = (tmp_path / name for name in ("undisturbed", "disturbed"))
    subprocess.run(finetune(undisturbed, **inputs, preflight=preflight), check=True)
    command = finetune(disturbed, **inputs, preflight=preflight)
    checkpoints = disturbed / "checkpoints"
    assert interrupt(command, checkpoints, number=signal.SIGKILL, worker=True) == 1
    assert interrupt(command, checkpoints, number=signal.SIGTERM, worker=False) == os.EX_TEMPFAIL
    subprocess.run(command, check=True)
    summary = json.loads((disturbed / "finetune" / "summary.json").read_text())
    print(json.dumps(summary["resumed_from_steps"]))
    assert len(summary["resumed_from_steps"]) == 2
    assert [row["step"] for row in metrics(disturbed)] == list(range(1, STEPS + 1))
    assert metrics(disturbed) == metrics(undisturbed)
    assert len(adapter(undisturbed)) == summary["processes"] == two_gpus
    assert adapter(disturbed) == adapter(undisturbed)
