"""Real runs of the real Snakefile: what they leave, and what a repeated command does."""

import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.workflow_project import (
    STEPS,
    Project,
    adapter_bytes,
    copy_of_repository,
    executed,
    make_project,
    write_rows,
)
from workflow.lib.artifacts.layout import base_dir
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Quantization
from workflow.lib.settings.config import load_config

IDS = torch.tensor([[3, 11, 290, 64, 5, 201, 17, 8, 133, 41, 2]])
ARTIFACTS = {
    f"results/{folder}/{name}"
    for folder, names in {
        "models/tiny-*": "description.json",
        "base/tiny-*": (
            "SHA256SUMS chat_template.jinja config.json generation_config.json "
            "model-00001-of-00001.safetensors model.safetensors.index.json quantization.json "
            "tokenizer.json tokenizer_config.json"
        ),
        "evaluations/*": "heldout-*.json other_texts-*.json samples-*.json",
        "benchmarks/*": "*.tsv",
        "report": "comparison.csv report.html",
        "settings/*": "*.json",
        "tensorboard/demo": "events.out.tfevents.*",
        "runs/demo/consolidate/adapter": (
            "README.md SHA256SUMS adapter_config.json adapter_model.safetensors "
            "chat_template.jinja generation_config.json tokenizer.json tokenizer_config.json"
        ),
        "runs/demo/consolidate": "parity.json",
        "runs/demo/evaluate_run": "base.json original.json tuned.json items.json",
        "runs/demo/finetune/adapter": "*",
        "runs/demo/finetune": "adapter_config.json metrics.jsonl parity.safetensors summary.json",
        "runs/demo/preflight_run": "preflight.json",
        "tokens/qa-*": (
            "heldout.input_ids.npy heldout.loss_mask.npy heldout.offsets.npy manifest.json "
            "rejects.jsonl train.input_ids.npy train.loss_mask.npy train.position_ids.npy "
            "truncated.jsonl"
        ),
    }.items()
    for name in names.split()
}


@pytest.fixture
def project(finished_project, tmp_path):
    return finished_project.copy(tmp_path / "project")


def without_card(project):
    """Modification times of what training and export left; the card stands in the adapter's
    folder."""
    found = times(project.folder("finetune")) | times(project.folder("consolidate"))
    card = project.folder("consolidate") / "adapter" / "README.md"
    return {path: time for path, time in found.items() if path not in (str(card), str(card.parent))}


def times(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def load(folder):
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


@torch.no_grad()
def logits(model):
    result: torch.Tensor = model(input_ids=IDS).logits
    return result


# What a finished project is.


def test_all_leaves_the_artifacts_of_the_design_and_no_others(finished_project):
    root = finished_project.root
    files = {path for path in root.glob("results/**/*") if path.is_file() and path.name[0] != "."}
    matches = {pattern: set(root.glob(pattern)) for pattern in ARTIFACTS}
    assert [pattern for pattern, found in matches.items() if not found] == []
    checkpoints = set(root.glob("results/checkpoints/demo-*/**/*"))
    assert files - set().union(*matches.values()) - checkpoints == set()


def test_second_invocation_runs_and_changes_nothing(project):
    before = times(project.root / "results")
    done = project.run("all")
    assert done.nothing_to_do
    assert executed(done.output) == {}
    assert times(project.root / "results") == before


def test_prediction_that_fits_is_a_few_lines_and_its_own_target_prints_the_tables(project):
    said = (project.root / "logs" / "preflight_run" / "demo.log").read_text()
    assert "run demo fits: a process takes" in said
    printed = project.run("preflight").output
    assert "run demo: memory of each process" in printed


def test_training_lowered_the_loss(finished_project):
    """So that the equalities below are not those of an adapter that does nothing."""
    summary = finished_project.json("finetune", "summary.json")
    assert summary["final_loss"] < 0.8 * summary["first_loss"]


def test_exported_adapter_loads_with_stock_packages(finished_project):
    base = load(finished_project.root / "model")
    before = logits(base)
    tuned = PeftModel.from_pretrained(base, finished_project.folder("consolidate") / "adapter")
    after = logits(tuned.eval())
    assert after.isfinite().all()
    assert (after - before).abs().max() > 0.1


@pytest.mark.slow
def test_checkout_in_a_folder_of_any_name_trains(tmp_path):
    """Its name is part of paths, of the environment and of commands."""
    repository = copy_of_repository(tmp_path / "a b'c\"d é $(exit 1)")
    project = Project(make_project(repository).root, repository=repository)
    project.run("train")
    assert project.json("finetune", "summary.json")["num_steps"] == 6


# What an edit of a finished project changes.


def test_new_evaluation_leaves_training_untouched(project):
    """But for the model card, which names the results."""
    before = without_card(project)
    project.edit({"evaluate": {"samples": 1}})
    done = project.run("all")
    assert executed(done.output) == {"evaluate_run": 1, "write_card": 1, "render_report": 1}
    assert len(project.json("evaluate_run", "tuned.json")["samples"]) == 1
    assert without_card(project) == before


def test_setting_without_effect_on_the_result_continues_from_the_last_checkpoint(project):
    """On other hardware too: the plan is made at every start, for one process now instead of
    two."""
    before = adapter_bytes(project)
    project.edit({"train": {"log_every_steps": 2}, "hardware": {"cpu_processes": 1}})
    shutil.rmtree(project.folder("finetune"))  # neither setting asks for a new training
    project.run("train")
    summary = project.json("finetune", "summary.json")
    assert (summary["processes"], summary["resumed_from_steps"]) == (1, [STEPS])
    assert adapter_bytes(project) == before


def test_new_rows_in_the_same_file_train_from_the_start(project):
    """A checkpoint of the old rows has the same settings; it must not be continued."""
    before = project.json("finetune", "summary.json")
    write_rows(project.root / "data" / "train.jsonl", first=500, rows=60)
    project.edit({"hardware": {"cpu_processes": 1}})
    project.run("results/runs/demo/finetune/summary.json")
    after = project.json("finetune", "summary.json")
    assert after["resumed_from_steps"] == []
    assert after["first_loss"] != pytest.approx(before["first_loss"], rel=1e-3)


def test_calibrated_base_is_made_with_the_tokens_of_the_run(project):
    project.edit({"quantize": {"method": "calibrated", "calibration_tokens": 512}})
    (run,) = load_config(project.settings)[1].values()
    done = project.run(base_dir(run))
    assert executed(done.output) == {"quantize_base": 1}
    record = read_record(project.root / base_dir(run) / "quantization.json", Quantization)
    assert record.calibration is not None
    assert 256 <= record.calibration.tokens <= 512
    assert len(record.calibration.heldout.tokens) > 1
    assert project.plan(base_dir(run)) == {}
