"""Real runs of the real Snakefile: what they leave, what interrupts them, and what a repeated
command does.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.chaos import complete, differences, storm
from tests.support.hub_server import HubRepo, start_hub
from tests.support.workflow_project import (
    STEPS,
    TIMEOUT_S,
    Finished,
    Project,
    copy_of_repository,
    executed,
    make_project,
    run_folders,
    write_rows,
)
from workflow.lib.export.stock_models import load_adapter, load_base

ADAPTER = "adapter/adapter_model.safetensors"
IDS = torch.tensor([[3, 11, 290, 64, 5, 201, 17, 8, 133, 41, 2]])

# Faults of `tests.support.chaos` that cost no wait and make no artifact anew.
QUICK = (
    "SIGKILL of a rank",
    "SIGKILL of torchrun",
    "SIGTERM to a rank",
    "SIGUSR1 to torchrun",
    "newest checkpoint, one bit flipped",
    "metrics and history cut",
    "SIGKILL of a stage or its shell",
    "SIGKILL of everything",
)

ARTIFACTS = {
    "results/base/tiny-*/SHA256SUMS",
    "results/base/tiny-*/chat_template.jinja",
    "results/base/tiny-*/config.json",
    "results/base/tiny-*/generation_config.json",
    "results/base/tiny-*/model-00001-of-00001.safetensors",
    "results/base/tiny-*/model.safetensors.index.json",
    "results/base/tiny-*/quantization.json",
    "results/base/tiny-*/tokenizer.json",
    "results/base/tiny-*/tokenizer_config.json",
    "results/evaluations/*/heldout-*.json",
    "results/evaluations/*/samples-*.json",
    "results/report/comparison.csv",
    "results/tensorboard/demo/events.out.tfevents.*",
    "results/report/figures/heldout.png",
    "results/report/figures/loss.png",
    "results/report/report.html",
    "results/runs/demo/consolidate/adapter/README.md",
    "results/runs/demo/consolidate/adapter/SHA256SUMS",
    "results/runs/demo/consolidate/adapter/adapter_config.json",
    "results/runs/demo/consolidate/adapter/adapter_model.safetensors",
    "results/runs/demo/consolidate/adapter/chat_template.jinja",
    "results/runs/demo/consolidate/adapter/generation_config.json",
    "results/runs/demo/consolidate/adapter/tokenizer.json",
    "results/runs/demo/consolidate/adapter/tokenizer_config.json",
    "results/runs/demo/consolidate/parity.json",
    "results/runs/demo/evaluate_run/base.json",
    "results/runs/demo/evaluate_run/tuned.json",
    "results/runs/demo/finetune/adapter/*",
    "results/runs/demo/finetune/adapter_config.json",
    "results/runs/demo/finetune/metrics.jsonl",
    "results/runs/demo/finetune/parity.safetensors",
    "results/runs/demo/finetune/summary.json",
    "results/runs/demo/preflight_run/preflight.json",
    "results/tokens/qa-*/heldout.input_ids.npy",
    "results/tokens/qa-*/heldout.loss_mask.npy",
    "results/tokens/qa-*/heldout.offsets.npy",
    "results/tokens/qa-*/manifest.json",
    "results/tokens/qa-*/rejects.jsonl",
    "results/tokens/qa-*/train.input_ids.npy",
    "results/tokens/qa-*/train.loss_mask.npy",
    "results/tokens/qa-*/train.position_ids.npy",
    "results/tokens/qa-*/truncated.jsonl",
}


@pytest.fixture
def project(finished_project: Project, tmp_path: Path) -> Project:
    return finished_project.copy(tmp_path / "project")


def adapter_bytes(project: Project) -> bytes:
    return (project.folder("consolidate") / ADAPTER).read_bytes()


def without_card(project: Project) -> dict[str, int]:
    """Modification times of what training and export left; the card stands in the adapter's
    folder.
    """
    found = times(project.folder("finetune")) | times(project.folder("consolidate"))
    card = project.folder("consolidate") / "adapter" / "README.md"
    return {path: time for path, time in found.items() if path not in (str(card), str(card.parent))}


def times(folder: Path) -> dict[str, int]:
    """Modification times below a folder, ns."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=IDS).logits
    return result


def rms(values: torch.Tensor) -> float:
    return float(values.pow(2).mean().sqrt())


# What a finished project is.


def test_all_leaves_the_artifacts_of_the_design_and_no_others(finished_project: Project) -> None:
    root = finished_project.root
    files = {path for path in root.glob("results/**/*") if path.is_file() and path.name[0] != "."}
    matches = {pattern: set(root.glob(pattern)) for pattern in ARTIFACTS}
    assert [pattern for pattern, found in matches.items() if not found] == []
    checkpoints = set(root.glob("results/checkpoints/demo-*/**/*"))
    assert files - set().union(*matches.values()) - checkpoints == set()


def test_second_invocation_runs_and_changes_nothing(project: Project) -> None:
    before = times(project.root / "results")
    done = project.run("all")
    assert done.nothing_to_do
    assert executed(done.output) == {}
    assert times(project.root / "results") == before


def test_training_lowered_the_loss(finished_project: Project) -> None:
    """So that the equalities below are not those of an adapter that does nothing."""
    summary = finished_project.json("finetune", "summary.json")
    assert summary["final_loss"] < 0.8 * summary["first_loss"]


def test_exported_adapter_loads_with_stock_packages(finished_project: Project) -> None:
    base = load(finished_project.root / "model")
    before = logits(base)
    tuned = PeftModel.from_pretrained(base, finished_project.folder("consolidate") / "adapter")
    after = logits(tuned.eval())
    assert after.isfinite().all()
    assert (after - before).abs().max() > 0.1


# What an edit of a finished project changes.


def test_new_evaluation_leaves_training_untouched(project: Project) -> None:
    """But for the model card, which names the results."""
    before = without_card(project)
    project.edit({"evaluate": {"samples": 1}})
    done = project.run("all")
    assert executed(done.output) == {"evaluate_run": 1, "write_card": 1, "render_report": 1}
    assert len(project.json("evaluate_run", "tuned.json")["samples"]) == 1
    assert without_card(project) == before


def test_setting_without_effect_on_the_result_continues_from_the_last_checkpoint(
    project: Project,
) -> None:
    """On other hardware too: the plan is made at every start, for one process now instead of
    two.
    """
    before = adapter_bytes(project)
    project.edit({"train": {"log_every_steps": 2}, "hardware": {"cpu_processes": 1}})
    project.run("--forcerun", "finetune", "--", "train")  # neither setting asks for it
    summary = project.json("finetune", "summary.json")
    assert (summary["processes"], summary["resumed_from_steps"]) == (1, [STEPS])
    assert adapter_bytes(project) == before


def test_new_rows_in_the_same_file_train_from_the_start(project: Project) -> None:
    """A checkpoint of the old rows has the same settings; it must not be continued."""
    before = project.json("finetune", "summary.json")
    write_rows(project.root / "data" / "train.jsonl", first=500, rows=60)
    project.edit({"hardware": {"cpu_processes": 1}})
    project.run("results/runs/demo/finetune/summary.json")
    after = project.json("finetune", "summary.json")
    assert after["resumed_from_steps"] == []
    assert after["first_loss"] != pytest.approx(before["first_loss"], rel=1e-3)


def test_merged_model_is_base_and_adapter_without_training_again(project: Project) -> None:
    project.edit({"export": {"merged": True}})
    done = project.run("train")
    assert executed(done.output) == {"consolidate_and_merged": 1}
    (base,) = project.root.glob("results/base/tiny-*")
    nf4 = load_base(base, device=torch.device("cpu"), compute_dtype=torch.float32, attention="sdpa")
    before = logits(nf4)
    expected = logits(load_adapter(nf4, project.folder("consolidate") / "adapter"))
    merged = logits(load(project.folder("consolidate") / "merged"))
    # bf16 moves every weight by up to 2**-9 of itself, embedding and head too, and the logits by
    # 0.65% of themselves (measured). The adapter moves them by 113%: a merge that loses or doubles
    # it, or one layer of it, is far outside.
    assert rms(merged - expected) < 0.03 * rms(before - expected)


# Interruptions.


@dataclass(frozen=True)
class Stopped:
    """What Ctrl-C did."""

    done: Finished
    saved_steps: list[int]


@dataclass(frozen=True)
class Killed:
    """What a command said while training went on without Snakemake, and what the end of that
    training left alive.
    """

    refused: Finished
    orphans: list[int]
    survivors: list[psutil.Process]


def signal_snakemake_alone(project: Project, *, number: signal.Signals) -> Stopped:
    """Send a signal to Snakemake's process, not to its group, as `kill` and a scheduler do."""
    process = start_and_wait_for_checkpoint(project, after=max(saved_steps(project), default=0))
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=TIMEOUT_S)
    _, alive = psutil.wait_procs(below, timeout=0)
    assert alive == [], "Snakemake waits for its jobs"
    return Stopped(Finished(process.returncode, output), saved_steps(project))


@dataclass(frozen=True)
class Interrupted:
    """A run that was stopped by Ctrl-C, then killed, then repeated to its end."""

    project: Project
    stopped: Stopped
    killed: Killed
    repeated: Finished


def saved_steps(project: Project) -> list[int]:
    """Steps with a checkpoint of the run of `STEPS` steps."""
    folders = run_folders(project, num_steps=STEPS)
    return sorted(int(path.name[5:]) for folder in folders for path in folder.glob("step-*"))


def start_and_wait_for_checkpoint(project: Project, *, after: int) -> subprocess.Popen[str]:
    """Start training; return when a checkpoint of a later step than `after` is there."""
    process = project.start("train")
    deadline = time.monotonic() + TIMEOUT_S
    while max(saved_steps(project), default=0) <= after:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)
    return process


def press_ctrl_c(project: Project) -> Stopped:
    process = start_and_wait_for_checkpoint(project, after=0)
    os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to the whole group
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return Stopped(Finished(process.returncode, output), saved_steps(project))


def kill(project: Project, *, after: int) -> Killed:
    """Kill Snakemake alone, as when memory runs out; repeat the command; then kill what Snakemake
    had started.
    """
    process = start_and_wait_for_checkpoint(project, after=after)
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()  # a group that is stopped when its parent ends is sent SIGHUP by the kernel
    for orphan in below:
        orphan.suspend()  # so that the training cannot end before the command is repeated
    refused = project.snakemake("train")
    os.killpg(process.pid, signal.SIGKILL)  # the launcher; the workers are in groups of their own
    process.communicate()
    _, survivors = psutil.wait_procs(below, timeout=TIMEOUT_S)
    for survivor in survivors:
        survivor.kill()
    return Killed(refused, [orphan.pid for orphan in below], survivors)


def ready_to_train(finished_project: Project, root: Path) -> Project:
    """A project with tokens and base, whose training is still to come."""
    project = finished_project.copy(root)
    for folder in ("checkpoints", "runs/demo/finetune", "runs/demo/consolidate"):
        shutil.rmtree(project.root / "results" / folder)
    return project


@pytest.fixture(scope="module")
def interrupted(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    project = ready_to_train(finished_project, tmp_path_factory.mktemp("run") / "interrupted")
    stopped = press_ctrl_c(project)
    killed = kill(project, after=max(stopped.saved_steps))
    return Interrupted(project, stopped, killed, project.run("train"))


@pytest.mark.slow
def test_ctrl_c_stops_before_the_training_has_ended(interrupted: Interrupted) -> None:
    assert interrupted.stopped.done.status != 0
    assert interrupted.stopped.saved_steps[-1] < STEPS


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_of_the_step_it_stopped_at(interrupted: Interrupted) -> None:
    output = interrupted.stopped.done.output
    assert f"stopped after step {interrupted.stopped.saved_steps[-1]} of {STEPS}" in output
    assert "Traceback" not in output


# Signal, and what Ctrl-C does to a process that is started there; a script's `&` has it ignored.
ALONE = {
    "SIGTERM": (signal.SIGTERM, signal.default_int_handler),
    "SIGINT": (signal.SIGINT, signal.default_int_handler),
    "SIGTERM in the background": (signal.SIGTERM, signal.SIG_IGN),
}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ctrl_c"), ALONE.values(), ids=ALONE)
def test_signal_to_snakemake_alone_ends_the_training_with_a_checkpoint(
    finished_project: Project, tmp_path: Path, number: signal.Signals, ctrl_c: Any
) -> None:
    project = ready_to_train(finished_project, tmp_path / "project")
    before = signal.signal(signal.SIGINT, ctrl_c)
    try:
        stopped = signal_snakemake_alone(project, number=number)
    finally:
        signal.signal(signal.SIGINT, before)
    assert_stopped_in_order(stopped)


def assert_stopped_in_order(stopped: Stopped) -> None:
    assert stopped.done.status == 1, stopped.done.output
    assert "Traceback" not in stopped.done.output
    last = stopped.saved_steps[-1]
    assert last < STEPS
    assert f"stopped after step {last} of {STEPS}" in stopped.done.output
    said = "logs/finetune/demo.log: training was stopped by a signal; the same command continues"
    assert said in stopped.done.output


@pytest.mark.slow
def test_command_repeated_while_an_orphan_trains_names_its_process(
    interrupted: Interrupted,
) -> None:
    refused = interrupted.killed.refused
    assert refused.status == 1
    assert "Traceback" not in refused.output
    named = re.findall(r"process (\d+) is training this run", refused.output)
    assert named
    assert {int(pid) for pid in named} <= set(interrupted.killed.orphans)


@pytest.mark.slow
def test_no_worker_outlives_its_launcher(interrupted: Interrupted) -> None:
    assert interrupted.killed.survivors == []


@pytest.mark.slow
def test_same_command_continues_after_ctrl_c_and_after_a_kill(interrupted: Interrupted) -> None:
    resumed = interrupted.project.json("finetune", "summary.json")["resumed_from_steps"]
    assert len(resumed) == 2
    assert interrupted.stopped.saved_steps[-1] == resumed[0] < resumed[1] < STEPS


@pytest.mark.slow
def test_command_repeated_after_a_kill_tells_how_far_training_had_come(
    interrupted: Interrupted,
) -> None:
    """After Ctrl-C it does not: that was told."""
    told = (
        r"the training before this one \(process \d+\) was killed after step (\d+); its newest "
        r"checkpoint is that of step (\d+)"
    )
    ((reached, newest),) = re.findall(told, interrupted.repeated.output)
    _, resumed = interrupted.project.json("finetune", "summary.json")["resumed_from_steps"]
    assert int(reached) >= int(newest) == resumed
    assert "was killed after" not in interrupted.killed.refused.output


@pytest.mark.slow
def test_metrics_of_an_interrupted_run_have_every_step_once(interrupted: Interrupted) -> None:
    lines = (interrupted.project.folder("finetune") / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_interrupted_run_ends_with_the_bytes_of_an_undisturbed_one(
    interrupted: Interrupted, finished_project: Project
) -> None:
    assert adapter_bytes(interrupted.project) == adapter_bytes(finished_project)


@pytest.mark.slow
def test_three_faults_at_random_moments_change_no_artifact(
    finished_project: Project, tmp_path: Path
) -> None:
    """The short form; `python -m tests.support.chaos` is the long one."""
    project = ready_to_train(finished_project, tmp_path / "project")
    chance = random.Random(11)
    rows = list(storm(project, "train", names=QUICK, most=3, chance=chance, tried=Counter()))
    complete(project, "train")
    assert rows
    assert not any("TRACEBACK" in row.said for row in rows), rows
    silent = [row.said for row in rows if row.fault == "SIGKILL of torchrun"]
    assert all("the stage ended without a word" in said for said in silent), rows
    assert differences(project, finished_project) == []


@pytest.mark.slow
def test_cause_of_a_failed_training_stands_at_the_end_of_the_terminals_output(
    finished_project: Project, tmp_path: Path
) -> None:
    """Broken by a rate that no adapter survives; the message is the last thing that the user
    sees.
    """
    project = ready_to_train(finished_project, tmp_path / "project")
    rate = {"learning_rate": 1.0, "max_grad_norm": None, "adam_beta2": 0.0}
    project.edit({"train": rate, "lora": {"alpha": 65536.0}})
    done = project.snakemake("train")
    assert done.status == 1, done.output
    end = done.output.splitlines()[-6:]
    (said,) = [line for line in end if line.startswith("logs/finetune/demo.log: step ")]
    assert "the updates have broken the model. Lower train.learning_rate" in said
    assert "Repeat the command to continue from what is finished" in said
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_checkout_in_a_folder_of_any_name_trains(tmp_path: Path) -> None:
    """Its name is part of paths, of the environment and of commands."""
    repository = copy_of_repository(tmp_path / "a b'c\"d é $(exit 1)")
    project = Project(make_project(repository).root, repository=repository)
    project.run("train")
    assert project.json("finetune", "summary.json")["num_steps"] == 6


# Model and dataset of the hub.


@pytest.fixture(scope="module")
def hub_files(finished_project: Project) -> dict[str, dict[str, bytes]]:
    """The files of the project's model and dataset, by kind."""
    return {
        kind: {path.name: path.read_bytes() for path in (finished_project.root / folder).iterdir()}
        for kind, folder in (("model", "model"), ("dataset", "data"))
    }


def hub_project(root: Path, endpoint: str, **changes: object) -> Project:
    """A project without local model and data: both are named by their hub ids."""
    made = make_project(root / "project", hardware={"gpus": 0, "cpu_processes": 1}, **changes)
    shutil.rmtree(made.root / "model")
    shutil.rmtree(made.root / "data")
    made.edit(
        {
            "model": {"source": "acme/tiny"},
            "data": {"source": "acme/qa", "train": "train.jsonl", "heldout": "heldout.jsonl"},
        }
    )
    variables = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(root / "cache")}
    return Project(made.root, environment=variables)


@pytest.mark.slow
def test_model_and_dataset_of_the_hub_are_downloaded_recorded_and_trained(
    hub_files: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    model, data = HubRepo(hub_files["model"]), HubRepo(hub_files["dataset"], kind="dataset")
    with start_hub({"acme/tiny": model, "acme/qa": data}) as endpoint:
        project = hub_project(tmp_path, endpoint)
        project.run("results/runs/demo/finetune/summary.json")
    recorded = {
        path.parts[-3]: json.loads(path.read_text())["commit"]
        for path in project.root.glob("results/hub/*/*/source.json")
    }
    assert recorded == {"model": model.find("main"), "dataset": data.find("main")}
    assert project.json("finetune", "summary.json")["num_steps"] == 6


@pytest.mark.parametrize(
    ("train", "gated", "message"),
    [
        ("train.jsonl", True, ["acme/tiny", "licence"]),
        ("none.jsonl", False, ["none.jsonl", "acme/qa"]),
    ],
    ids=["gated model", "missing file"],
)
def test_download_that_is_refused_is_one_message(
    hub_files: dict[str, dict[str, bytes]],
    tmp_path: Path,
    train: str,
    gated: bool,
    message: list[str],
) -> None:
    model, data = HubRepo(hub_files["model"]), HubRepo(hub_files["dataset"], kind="dataset")
    model.gated = gated
    with start_hub({"acme/tiny": model, "acme/qa": data}) as endpoint:
        project = hub_project(tmp_path, endpoint)
        project.edit({"data": {"train": train}})
        done = project.snakemake("train")
    assert done.status == 1
    assert "Traceback" not in done.output
    assert set(executed(done.output)) == {"download_source"}
    assert "model.safetensors" not in model.downloads()  # which may be large
    end = done.output.splitlines()[-6:]
    assert [all(part in line for part in message) for line in end].count(True) == 1, done.output
