"""The stages one after the other on all GPUs of this machine, as the rules call them, on the
embedded demo."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workflow.lib.artifacts import layout
from workflow.lib.settings.config import load_config
from workflow.lib.system.files import read_checked_json

pytestmark = pytest.mark.gpu


TRAIN = {"epochs": None, "max_steps": 60, "learning_rate": 1e-3, "evaluate_every_steps": 25}
DIVISIONS: dict[str, dict[str, Any]] = {
    "one": {"processes": 1, "shard": False, "batch_size": 8},
    "copies": {"processes": 2, "shard": False, "batch_size": 3},
    "slices": {"processes": 2, "shard": True, "batch_size": "auto"},
}
_, NAMED = load_config({"runs": {"gpu": {"train": TRAIN}}})
RUN = NAMED["gpu"]


def config(name, run=RUN):
    return layout.stage_json(name, run)


def stage(name, config, *arguments):
    """Run one stage of the workflow; its output is shown if it fails."""
    command = [
        sys.executable,
        "-m",
        f"workflow.scripts.{name}",
        "--config",
        config,
        *map(str, arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_gpu):
    folder = tmp_path_factory.mktemp("demo")
    tokens, base, preflight = folder / "tokens", folder / "base", folder / "preflight.json"
    model = Path(RUN.model.source)
    stage("tokenize_dataset", config("tokenize_dataset"),
          "--tokenizer", model, "--output", tokens)  # fmt: skip
    stage(
        "preflight_run",
        config("preflight_run"),
        "--model",
        model,
        "--tokens",
        tokens / "manifest.json",
        "--output",
        preflight,
        "--run",
        "gpu",
    )
    stage("quantize_base", config("quantize_base"), "--model", model, "--output", base)
    stage(
        "finetune",
        config("finetune"),
        "--run",
        "gpu",
        "--base",
        base,
        "--tokens",
        tokens,
        "--preflight",
        preflight,
        "--checkpoints",
        folder / "checkpoints-0",
        "--output",
        folder / "finetune",
    )
    stage(
        "consolidate",
        config("consolidate"),
        "--finetune",
        folder / "finetune",
        "--base",
        base,
        "--model",
        model,
        "--manifest",
        tokens / "manifest.json",
        "--output",
        folder / "export",
    )
    return folder


def test_demo_trains_and_exports_on_gpus_within_the_predicted_memory(folder):
    summary, parity = (
        read_checked_json(folder / "finetune" / "summary.json"),
        read_checked_json(folder / "export" / "parity.json"),
    )
    print(json.dumps({"summary": summary, "parity": parity}))
    assert summary["processes"] == torch.cuda.device_count()
    assert summary["final_loss"] < summary["first_loss"] - 0.3
    assert all(check["passed"] for check in summary["checks"])
    assert parity["passed"]
    assert summary["peak_bytes"]["kind"] == "cuda_allocated"
    assert summary["peak_bytes"]["measured"] <= 1.05 * summary["peak_bytes"]["predicted"]


def evaluated(folder, division):
    """Evaluate the export as a user would; return the tuned model's results."""
    settings = RUN.evaluate.model_copy(update=DIVISIONS[division])
    export, out = folder / "export" / "adapter", folder / division
    out.mkdir()
    stage(
        "evaluate_run",
        config("evaluate_run", RUN.model_copy(update={"evaluate": settings})),
        "--run",
        "gpu",
        "--base",
        folder / "base",
        "--adapter",
        export,
        "--tokens",
        folder / "tokens",
        "--archive",
        out / "archive",
        "--model",
        layout.model_dir(RUN),
        "--subjects",
        *RUN.subjects,
        "--served",
        RUN.served,
        "--output",
        out / "evaluate_run",
    )
    found: dict[str, Any] = read_checked_json(out / "evaluate_run" / "tuned.json")
    return found


def test_demo_is_measured_alike_on_one_gpu_and_on_two(folder, two_gpus):
    """In bfloat16, whose rounding depends on the shapes of matmuls: slices, copies, other
    batches."""
    one, copies, slices = (evaluated(folder, name) for name in DIVISIONS)
    for name, other in (("copies", copies), ("slices", slices)):
        scores = {
            (task, metric): (found["value"], other["tasks"][task]["metrics"][metric]["value"])
            for task, of in one["tasks"].items()
            for metric, found in of["metrics"].items()
        }
        print(name, one["heldout"]["loss"], other["heldout"]["loss"], scores)
        assert other["heldout"]["trained_tokens"] == one["heldout"]["trained_tokens"]
        assert other["heldout"]["loss"] == pytest.approx(one["heldout"]["loss"], rel=2e-3)
        assert scores
        for expected, value in scores.values():
            assert value == pytest.approx(expected, abs=0.03)  # 5 of 176 items
