"""Held-out loss while training, and the best adapter: equal to the evaluation's own measure, kept through a kill, and exported."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed import run_distributed
from tests.finished import CONFIG, PLAN, STEPS, arguments, finetune, prepare
from tests.models import quantized, random_store, tiny_llama
from workflow.lib.artifacts import read_json, read_jsonl
from workflow.lib.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.errors import UserError
from workflow.lib.export import read_sharded_adapter
from workflow.lib.heldout import heldout_losses
from workflow.lib.inference import load_base
from workflow.lib.selection import HeldOut, heldout_rows
from workflow.lib.setup import build_training_model
from workflow.lib.tokens import TokenStore
from workflow.lib.world import process_group

BEST = CONFIG.train.model_dump() | {"evaluate_every_steps": 2, "select": "best"}
SELECTING = RunConfig(lora=CONFIG.lora, train=TrainConfig(**BEST))
MEASURED = [2, 4, 6, 7]  # every second step, and the last


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage that has selected its best adapter, in two processes."""
    folder = tmp_path_factory.mktemp("selection") / "run"
    prepare(folder)
    run_distributed(finetune, arguments(folder), SELECTING, world_size=2)
    return folder


def heldout_by_step(run: Path) -> dict[int, float]:
    rows = read_jsonl(run / "finetune" / "metrics.jsonl")
    return {row["step"]: row["heldout_loss"] for row in rows if "heldout_loss" in row}


def checkpoints(run: Path) -> Path:
    return Path(arguments(run).checkpoints)


def test_loss_is_in_the_metrics_of_every_step_it_was_measured_after(run: Path) -> None:
    """Also of steps that are not logged otherwise: the log is of every third."""
    assert list(heldout_by_step(run)) == MEASURED


def test_exported_adapter_is_that_of_the_lowest_heldout_loss(run: Path) -> None:
    losses = heldout_by_step(run)
    best = min(losses, key=lambda step: losses[step])
    assert best < STEPS, "random tokens: the longer it trains, the worse it does on others"
    assert read_json(run / "finetune" / "summary.json")["selected_step"] == best
    exported = read_sharded_adapter(run / "finetune" / "adapter")
    kept = read_sharded_adapter(checkpoints(run) / f"best-{best:08d}")
    assert exported.keys() == kept.keys()
    assert all(torch.equal(exported[name], kept[name]) for name in kept)


def test_run_that_was_killed_selects_the_same_adapter(run: Path, tmp_path: Path) -> None:
    """After the checkpoint of step 4: what was measured and kept before it still counts."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.rmtree(checkpoints(folder) / f"step-{STEPS:08d}")
    shutil.rmtree(folder / "finetune")
    run_distributed(finetune, arguments(folder), SELECTING, world_size=2)
    assert read_json(folder / "finetune" / "summary.json")["resumed_from_steps"] == [4]
    assert heldout_by_step(folder) == heldout_by_step(run)
    found, expected = (read_sharded_adapter(f / "finetune" / "adapter") for f in (folder, run))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_best_adapter_that_is_gone_stops_the_run(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for kept in checkpoints(folder).glob("best-*"):
        shutil.rmtree(kept)
    with pytest.raises(AssertionError, match=r"lowest held-out loss, is not in .* train\.select"):
        run_distributed(finetune, arguments(folder), SELECTING, world_size=2)


def measure(base: Path) -> dict[int, float]:
    """Return the loss of a fresh adapter (which changes nothing) by micro-batch."""
    store = random_store(rows=4, seq_len=17)
    with process_group("cpu", timeout_s=60) as world:
        model = build_training_model(
            base, RunConfig(lora=LoraSettings(r=3, dropout=0.5)), PLAN, world,
            compute_dtype=torch.float32, attention="sdpa",
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


@pytest.mark.parametrize("processes", [1, 3])
def test_loss_is_that_of_the_evaluation(tmp_path: Path, processes: int) -> None:
    """Three processes have more turns than documents: some run without one. Dropout is off."""
    base = quantized(tiny_llama(tmp_path / "original"), tmp_path / "nf4")
    results = run_distributed(measure, base, world_size=processes)
    model = load_base(
        base, device=torch.device("cpu"), compute_dtype=torch.float32, attention="sdpa"
    )
    store = random_store(rows=4, seq_len=17)
    documents = [store.heldout_documents()[n] for n in range(3)]
    sums = heldout_losses(model, documents, batch_size=1, device=torch.device("cpu"))
    expected = sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums)
    for result in results:
        assert result == pytest.approx({1: expected, 2: expected}, rel=1e-5)


def documents(*lengths: int) -> list[Any]:
    return [(np.zeros(n, dtype=np.uint32), np.zeros(n, dtype=np.bool_)) for n in lengths]


def test_documents_fill_rows_in_their_order() -> None:
    rows = heldout_rows(documents(5, 3, 9, 1, 2), seq_len=10)
    assert [[len(ids) for ids, _ in row] for row in rows] == [[5, 3], [9, 1], [2]]


def test_no_document_to_measure_on_is_an_error() -> None:
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
