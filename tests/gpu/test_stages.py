"""The stages one after the other on all GPUs of this machine, as the rules call them, on the
embedded demo."""

import json

import pytest
import torch

from tests.support.forked_stage import forked_stage
from tests.support.settings_examples import demo_runs
from workflow.lib.artifacts import layout
from workflow.lib.settings.overrides import merge
from workflow.lib.system.files import read_checked_json

pytestmark = pytest.mark.gpu


TRAIN = {"epochs": None, "max_steps": 60, "learning_rate": 1e-3, "evaluate_every_steps": 25}
DIVISIONS = {
    "one": {"processes": 1, "shard": False, "batch_size": 8},
    "copies": {"processes": 2, "shard": False, "batch_size": 3},
    "slices": {"processes": 2, "shard": True, "batch_size": "auto"},
}
RUN = demo_runs({"gpu": {"train": TRAIN}})["gpu"]


def settings_of_stage(stage, run):
    """Return all settings of a stage, as the files of its rule have them together."""
    return merge(layout.stage_settings(stage, run), layout.free_settings(stage, run))


def stage(name, *words, of=RUN, **options):
    """Run one stage of the workflow with the settings of a run; its output is shown if it fails."""
    done = forked_stage(name, *words, config=settings_of_stage(name, of), **options)
    assert done.returncode == 0, done.stderr[-4000:]


def prepare(folder, *, of, run):
    """Tokenize, plan and quantize into `folder`; return what `finetune` reads."""
    model, tokens, base = of.model.source, folder / "tokens", folder / "base"
    stage("tokenize_dataset", of=of, tokenizer=model, output=tokens)
    stage("quantize_base", of=of, model=model, output=base)
    preflight = plan(folder / "preflight.json", of=of, run=run, tokens=tokens)
    return {"base": base, "tokens": tokens, "preflight": preflight}


def plan(path, *, of, run, tokens):
    manifest = tokens / "manifest.json"
    stage("preflight_run", of=of, model=of.model.source, tokens=manifest, output=path, run=run)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_gpu):
    folder = tmp_path_factory.mktemp("demo")
    inputs = prepare(folder, of=RUN, run="gpu")
    places = {"checkpoints": folder / "checkpoints-0", "output": folder / "finetune"}
    stage("finetune", run="gpu", **inputs, **places)
    stage(
        "consolidate", finetune=folder / "finetune", base=folder / "base",
        model=RUN.model.source, manifest=folder / "tokens" / "manifest.json",
        output=folder / "export",
    )  # fmt: skip
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
    out = folder / division
    out.mkdir()
    stage(
        "evaluate_run",
        of=RUN.model_copy(update={"evaluate": settings}), run="gpu", base=folder / "base",
        adapter=folder / "export" / "adapter", tokens=folder / "tokens", archive=out / "archive",
        model=layout.model_dir(RUN), output=out / "evaluate_run",
    )  # fmt: skip
    return read_checked_json(out / "evaluate_run" / "tuned.json")


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
