"""The stages one after the other on all GPUs of this machine, as the rules call them, on the embedded demo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workflow.lib import runs
from workflow.lib.artifacts import read_json
from workflow.lib.config import load_config

pytestmark = pytest.mark.gpu


def stage(name: str, config: str, *arguments: str | Path) -> None:
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


def test_demo_trains_and_exports_on_gpus_within_the_predicted_memory(
    tmp_path: Path, two_gpus: int
) -> None:
    _, named = load_config(
        {"runs": {"gpu": {"train": {"epochs": None, "max_steps": 60, "learning_rate": 1e-3}}}}
    )
    run = named["gpu"]
    tokens, base, preflight = tmp_path / "tokens", tmp_path / "base", tmp_path / "preflight.json"
    finetune, export = tmp_path / "finetune", tmp_path / "export"
    model = Path(run.model.source)

    def config(name: str) -> str:
        return runs.stage_json(name, run)

    stage("tokenize_dataset", config("tokenize_dataset"),
          "--tokenizer", model, "--output", tokens)  # fmt: skip
    stage("preflight_run", config("preflight_run"), "--model", model, "--tokens", tokens / "manifest.json",
          "--output", preflight, "--run", "gpu")  # fmt: skip
    stage("quantize_base", config("quantize_base"), "--model", model, "--output", base)
    stage("finetune", config("finetune"), "--run", "gpu", "--base", base, "--tokens", tokens, "--preflight", preflight,
          "--checkpoints", tmp_path / "checkpoints-0", "--output", finetune)  # fmt: skip
    stage("consolidate", config("consolidate"), "--finetune", finetune, "--base", base, "--model", model,
          "--output", export)  # fmt: skip
    summary, parity = read_json(finetune / "summary.json"), read_json(export / "parity.json")
    print(json.dumps({"summary": summary, "parity": parity}))
    assert summary["processes"] == torch.cuda.device_count()
    assert summary["final_loss"] < summary["first_loss"] - 0.3
    assert all(check["passed"] for check in summary["checks"])
    assert parity["passed"]
    assert parity["adapter_effect"] > 10 * parity["max_abs_difference"]
    # The closed form may be 2% under (docs/memory-model.md); here it was 0.2% on 2 x H200.
    assert summary["peak_bytes"]["measured"] <= 1.02 * summary["peak_bytes"]["predicted"]
