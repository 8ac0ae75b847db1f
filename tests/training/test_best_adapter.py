"""Held-out loss while training, and the best adapter: equal to the evaluation's own measure, kept
through a kill, and exported."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.built_models import built_model
from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.finished import CONFIG, PLAN, arguments, finetune, prepare
from tests.support.models import adapted, random_store, tiny_llama
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.distributed.world import process_group
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.export.adapter_files import read_sharded_adapter
from workflow.lib.export.stock_models import load_base
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.artifact_files import read_lines
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_checked_json
from workflow.lib.training.best_adapter import BestAdapter, HeldOut, heldout_rows

STEPS = 5
BEST = CONFIG.train.model_dump() | {"max_steps": STEPS, "evaluate_every_steps": 2, "select": "best"}
SELECTING = RunConfig(lora=CONFIG.lora, train=TrainConfig(**BEST))
SHORT = replace(PLAN, num_steps=STEPS)
MEASURED = [2, 4, 5]  # every second step, and the last


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selection") / "run"
    prepare(folder, model=partial(tiny_llama, num_hidden_layers=2))
    run_distributed(finetune, arguments(folder), SELECTING, SHORT, world_size=2)
    return folder


def heldout_by_step(run):
    rows = read_lines(run / "finetune" / "metrics.jsonl")
    return {row["step"]: row["heldout_loss"] for row in rows if "heldout_loss" in row}


def checkpoints(run):
    return Path(arguments(run).checkpoints)


def test_loss_is_in_the_metrics_of_every_step_it_was_measured_after(run):
    """Also of steps that are not logged otherwise: the log is of every third."""
    assert list(heldout_by_step(run)) == MEASURED


def test_exported_adapter_is_that_of_the_lowest_heldout_loss(run):
    losses = heldout_by_step(run)
    best = min(losses, key=lambda step: losses[step])
    assert best < STEPS, "random tokens: the longer it trains, the worse it does on others"
    assert read_checked_json(run / "finetune" / "summary.json")["selected_step"] == best
    exported = read_sharded_adapter(run / "finetune" / "adapter")
    kept = read_sharded_adapter(checkpoints(run) / f"best-{best:08d}")
    assert exported.keys() == kept.keys()
    assert all(torch.equal(exported[name], kept[name]) for name in kept)


def test_run_that_keeps_gathered_weights_after_forward_is_the_same(run, tmp_path):
    """The held-out loss has no backward that would free them. Checkpoints and results follow it."""
    inputs = shutil.ignore_patterns("finetune", "checkpoints")
    shutil.copytree(run, tmp_path, ignore=inputs, dirs_exist_ok=True)
    plan = replace(SHORT, reshard_after_forward=False)
    run_distributed(finetune, arguments(tmp_path), SELECTING, plan, world_size=2)
    assert heldout_by_step(tmp_path) == heldout_by_step(run)
    found, expected = (read_sharded_adapter(f / "finetune" / "adapter") for f in (tmp_path, run))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_run_that_was_killed_selects_the_same_adapter(run, tmp_path):
    """After the checkpoint of step 4: what was measured and kept before it still counts."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.rmtree(checkpoints(folder) / f"step-{STEPS:08d}")
    shutil.rmtree(folder / "finetune")
    run_distributed(finetune, arguments(folder), SELECTING, SHORT, world_size=2)
    assert read_checked_json(folder / "finetune" / "summary.json")["resumed_from_steps"] == [4]
    assert heldout_by_step(folder) == heldout_by_step(run)
    found, expected = (read_sharded_adapter(f / "finetune" / "adapter") for f in (folder, run))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_best_adapter_that_is_gone_stops_the_run(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for kept in checkpoints(folder).glob("best-*"):
        shutil.rmtree(kept)
    with pytest.raises(AssertionError, match=r"lowest held-out loss, is not in .* train\.select"):
        run_distributed(finetune, arguments(folder), SELECTING, SHORT, world_size=2)


def continued(base, folder):
    """Continue after step 4 a run that was killed after step 6; then once more after step 8."""

    def kept():
        return sorted(path.name for path in folder.glob("*best-*"))

    before = [{"step": 2, "heldout_loss": 3.0}, {"step": 4, "heldout_loss": 3.5}]
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        training, found = adapted(base, r=3), {}
        (folder / "step-00000004").mkdir(parents=True)
        killed = BestAdapter(folder, [], world=world)
        for step, loss in ((2, 3.0), (6, 2.0)):
            killed.offer(training, loss=loss, step=step)
        (folder / ".best-00000007.partial").mkdir()
        best = BestAdapter(folder, before, world=world)
        found["after the start"] = kept()
        (folder / "step-00000004").rename(folder / "step-00000008")
        best.offer(training, loss=2.5, step=9)
        found["after step 9"] = kept()
        found["best at step 8"] = BestAdapter(folder, before, world=world).step
        found["after another start"] = kept()
    return found


def test_best_adapters_beyond_the_step_that_a_run_continues_from_are_removed(run, tmp_path):
    """Else that of step 6, of which no line tells, passes for the best at step 8."""
    (found,) = run_distributed(continued, run / "base", tmp_path / "kept", world_size=1)
    assert found == {
        "after the start": ["best-00000002"],
        "after step 9": ["best-00000002", "best-00000009"],
        "best at step 8": 2,
        "after another start": ["best-00000002"],
    }


def measure(base):
    """Return the loss of a fresh adapter (which changes nothing) by micro-batch."""
    store = random_store(rows=4, seq_len=17)
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        model = built_model(
            base, RunConfig(lora=LoraSettings(r=3, dropout=0.5)), PLAN, world,
        )  # fmt: skip
        model.training.train()
        found = {
            size: HeldOut(
                store, every=1, num_steps=1, at_most=None, seed=0, micro_batch_size=size
            ).loss(model.training, world=world)
            for size in (1, 2)
        }
        assert model.training.training, "training goes on as before"
    return found


def test_loss_is_that_of_the_evaluation(base):
    """Three processes have more turns than documents: some run without one. Dropout is off."""
    results = run_distributed(measure, base, world_size=3)
    model = load_base(
        base, device=torch.device("cpu"), compute_dtype=torch.float32, attention="sdpa"
    )
    store = random_store(rows=4, seq_len=17)
    documents = [store.heldout_documents()[n] for n in range(3)]
    sums = heldout_losses(model, documents, batch_size=1, device=torch.device("cpu"))
    expected = sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)
    for result in results:
        assert result == pytest.approx({1: expected, 2: expected}, rel=1e-5)


def test_documents_fill_rows_in_their_order():
    assert heldout_rows([5, 3, 9, 1, 2], seq_len=10) == [[0, 1], [2, 3], [4]]


def test_no_document_to_measure_on_is_an_error():
    store = random_store(rows=4, seq_len=17)
    arrays: dict[str, Any] = {
        "train.input_ids.npy": store.input_ids,
        "train.loss_mask.npy": store.loss_mask,
        "train.position_ids.npy": store.position_ids,
        "heldout.input_ids.npy": np.zeros(0, dtype=np.uint32),
        "heldout.loss_mask.npy": np.zeros(0, dtype=np.bool_),
        "heldout.offsets.npy": np.array([0]),
    }
    empty = TokenStore(manifest={"seq_len": 17, "vocab_size": 211}, arrays=arrays)
    with pytest.raises(UserError, match=r"train\.evaluate_every_steps asks for the held-out loss"):
        HeldOut(empty, every=1, num_steps=1, at_most=None, seed=0, micro_batch_size=1)
