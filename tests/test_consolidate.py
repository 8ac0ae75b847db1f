"""The stage: a whole folder with what the design promises, or exit status 1 and nothing exported."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.finished import CONFIG, finished
from tests.models import write_shards
from workflow.lib.artifacts import file_sha256, read_json
from workflow.lib.config import ExportConfig
from workflow.lib.export import read_sharded_adapter
from workflow.scripts.consolidate import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.getbasetemp())


def settings(**export: Any) -> dict[str, Any]:
    config = CONFIG.model_copy(update={"export": ExportConfig(**export)})
    return config.model_dump(mode="json", include={"model", "export"})


@pytest.fixture(scope="module")
def output(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage's folder, from the untouched run, with the merged model."""
    output = tmp_path_factory.mktemp("consolidate") / "consolidate"
    main(argparse.Namespace(
        config=settings(merged=True, merge_onto="original"), finetune=run / "finetune", base=run / "base",
        model=run / "model", output=output,
    ))  # fmt: skip
    return output


def test_folder_has_what_the_design_promises_and_nothing_temporary(output: Path) -> None:
    assert {p.name for p in output.iterdir()} == {"adapter", "parity.json", "merged"}
    names = {"adapter_model.safetensors", "adapter_config.json", "SHA256SUMS"}
    assert {p.name for p in (output / "adapter").iterdir()} == names
    assert [p.name for p in output.parent.iterdir()] == ["consolidate"]


def test_parity_is_recorded_as_passed(output: Path) -> None:
    parity = read_json(output / "parity.json")
    assert parity["passed"]
    assert parity["identical_values"]
    assert "commit" in parity["provenance"]


def test_adapter_names_the_users_base_model(output: Path) -> None:
    config = read_json(output / "adapter" / "adapter_config.json")
    assert config["base_model_name_or_path"] == CONFIG.model.source
    assert config["revision"] is None


@pytest.mark.parametrize("folder", ["adapter", "merged"])
def test_checksums_cover_every_file(output: Path, folder: str) -> None:
    lines = (output / folder / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    present = {p.name for p in (output / folder).iterdir()} - {"SHA256SUMS"}
    assert listed.keys() == present
    assert all(file_sha256(output / folder / name) == digest for name, digest in listed.items())


def test_exported_adapter_is_the_sharded_one(run: Path, output: Path) -> None:
    exported = load_file(output / "adapter" / "adapter_model.safetensors")
    trained = read_sharded_adapter(run / "finetune" / "adapter")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)


@torch.no_grad()
def test_merged_model_predicts_as_the_adapter_on_the_original(run: Path, output: Path) -> None:
    merged = AutoModelForCausalLM.from_pretrained(output / "merged", dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    tuned = PeftModel.from_pretrained(original, str(output / "adapter"))
    ids = torch.tensor([[5, 3, 7, 100, 2]])
    ours, theirs = merged(ids).logits, tuned(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * float(theirs.abs().max()))  # bf16


def test_one_value_altered_after_training_exports_nothing(run: Path, tmp_path: Path) -> None:
    """By the command line, as Snakemake calls it: status 1, and the reason on terminal and in the log."""
    altered = read_sharded_adapter(run / "finetune" / "adapter")
    name = sorted(altered)[5]
    altered[name][0, 1] += 1e-4
    copy = tmp_path / "finetune"
    copy.mkdir()
    for file in (run / "finetune").iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    write_shards(copy / "adapter", altered)
    command = [
        sys.executable, "-m", "workflow.scripts.consolidate", "--config", json.dumps(settings()), "--finetune", copy,
        "--base", run / "base", "--model", run / "model", "--output", tmp_path / "consolidate", "--log", tmp_path / "log",
    ]  # fmt: skip
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        "the exported adapter is not the trained one: its values differ, logits differ by"
        in done.stderr
    )
    assert "Nothing is exported." in done.stderr
    assert "Traceback" not in done.stderr
    assert "its values differ" in (tmp_path / "log").read_text()
    assert not (tmp_path / "consolidate").exists()
