"""Held-out loss while training, and the best adapter: equal to the evaluation's own measure, kept
through a kill, and exported."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.built_models import built_model
from tests.support.distributed import run_distributed, run_in_group
from tests.support.finished import CONFIG, PLAN, arguments, finetune, prepare
from tests.support.models import adapted, heldout_from, random_store, stock_base, tiny_llama
from tests.support.token_arrays import token_arrays
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.evaluation.heldout_loss import heldout_losses
from workflow.lib.export.adapter_files import read_sharded_adapter
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.checksums import read_lines
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256, read_checked_json, write_checked_json
from workflow.lib.training.best_adapter import BestAdapter, HeldOut, heldout_rows, patience_is_over

STEPS = 5
BEST = CONFIG.train.model_dump() | {"max_steps": STEPS, "evaluate_every_steps": 2, "select": "best"}
SELECTING = RunConfig(lora=CONFIG.lora, train=TrainConfig(**BEST))
SHORT = replace(PLAN, num_steps=STEPS)
LONG = replace(PLAN, num_steps=3 * STEPS)
# So small a rate changes adapters and no loss in float32; as low is not lower: the first is best.
ENDING = {
    "max_steps": 3 * STEPS,
    "evaluate_every_steps": 1,
    "early_stopping_patience": 1,
    "learning_rate": 1e-30,
}
IMPATIENT = RunConfig(lora=CONFIG.lora, train=TrainConfig(**BEST | ENDING))
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


def test_exported_adapter_is_that_of_the_lowest_heldout_loss(run, ended):
    """`ended` has gone on after it."""
    for folder in (run, ended):
        losses = heldout_by_step(folder)
        best = min(losses, key=lambda step: losses[step])
        assert read_checked_json(folder / "finetune" / "summary.json")["selected_step"] == best
        exported = read_sharded_adapter(folder / "finetune" / "adapter")
        kept = read_sharded_adapter(checkpoints(folder) / f"best-{best:08d}")
        assert exported.keys() == kept.keys()
        assert all(torch.equal(exported[name], kept[name]) for name in kept)
    assert (best, max(losses)) == (1, 2)


def test_run_that_keeps_gathered_weights_after_forward_is_the_same(run, tmp_path):
    """The held-out loss has no backward that would free them. Checkpoints and results follow it."""
    inputs = shutil.ignore_patterns("finetune", "checkpoints")
    shutil.copytree(run, tmp_path, ignore=inputs, dirs_exist_ok=True)
    plan = replace(SHORT, reshard_after_forward=False)
    run_distributed(finetune, arguments(tmp_path), SELECTING, plan, world_size=2)
    assert heldout_by_step(tmp_path) == heldout_by_step(run)
    found, expected = (read_sharded_adapter(f / "finetune" / "adapter") for f in (tmp_path, run))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def edit_heldout(tokens):
    """Turn the trained held-out tokens round, in place; the training tokens stay."""
    path = tokens / "heldout.input_ids.npy"
    np.save(path, np.load(path)[::-1])
    facts = read_checked_json(tokens / "manifest.json")
    facts["files"][path.name] = file_sha256(path)
    write_checked_json(tokens / "manifest.json", facts)


@pytest.mark.parametrize("select", ["best", "last"])
def test_heldout_losses_of_other_data_neither_choose_nor_stay_in_the_metrics(run, tmp_path, select):
    """A run that chooses by them begins anew; any other goes on from its checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.rmtree(checkpoints(folder) / f"step-{STEPS:08d}")
    shutil.rmtree(folder / "finetune")
    edit_heldout(folder / "tokens")
    train = SELECTING.train.model_copy(update={"select": select})
    config = SELECTING.model_copy(update={"train": train})
    run_distributed(finetune, arguments(folder), config, SHORT, world_size=2)
    measured = heldout_by_step(folder)
    assert list(measured) == (MEASURED if select == "best" else MEASURED[-1:])
    assert not {*measured.items()} & {*heldout_by_step(run).items()}
    assert checkpoints(folder).joinpath("set-aside-1").is_dir() == (select == "best")


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


@pytest.fixture(scope="module")
def ended(run, tmp_path_factory):
    """A run that its first held-out loss above the lowest ends, before its last step."""
    folder = tmp_path_factory.mktemp("patience") / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("finetune", "checkpoints"))
    run_distributed(finetune, arguments(folder), IMPATIENT, LONG, world_size=2)
    return folder


def test_run_ends_when_its_patience_is_over(ended):
    first, second = heldout_by_step(ended).values()
    assert first == second
    summary = read_checked_json(ended / "finetune" / "summary.json")
    assert summary["num_steps"] == 2 < LONG.num_steps == summary["planned_steps"]


def test_run_that_was_killed_at_its_early_end_takes_no_more_step(ended, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(ended, folder)
    shutil.rmtree(folder / "finetune")
    run_distributed(finetune, arguments(folder), IMPATIENT, LONG, world_size=2)
    assert heldout_by_step(folder) == heldout_by_step(ended)
    found, expected = (read_sharded_adapter(f / "finetune" / "adapter") for f in (folder, ended))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("losses", "patience", "over"),
    [
        ([], 1, False),
        ([3.0], 1, False),
        ([3.0, 3.0], 1, True),  # as low is not lower
        ([3.0, 2.0, 2.5], 2, False),
        ([3.0, 2.0, 2.5, 2.1], 2, True),
        ([3.0, 2.0, 2.5, 1.9], 2, False),
        ([3.0, 4.0, 5.0], None, False),
    ],
)
def test_patience_is_over_after_as_many_losses_of_which_none_is_the_lowest(losses, patience, over):
    assert patience_is_over(losses, patience) is over


def continued(world, base, folder):
    """Continue after step 4 a run that was killed after step 6; then once more after step 8."""

    def kept():
        return sorted(path.name for path in folder.glob("*best-*"))

    before = [{"step": 2, "heldout_loss": 3.0}, {"step": 4, "heldout_loss": 3.5}]
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
    (found,) = run_in_group(continued, run / "base", tmp_path / "kept", world_size=1)
    assert found == {
        "after the start": ["best-00000002"],
        "after step 9": ["best-00000002", "best-00000009"],
        "best at step 8": 2,
        "after another start": ["best-00000002"],
    }


def kept_beside(world, folder, saved):
    """Return the steps of the best adapters that are kept of a loss that was lower every step."""
    rows = [{"step": step, "heldout_loss": 10.0 - step} for step in range(1, 9)]
    for row in rows:
        (folder / f"best-{row['step']:08d}").mkdir(parents=True)
    for step in saved:
        (folder / f"step-{step:08d}").mkdir()
    BestAdapter(folder, rows, world=world)
    return sorted(int(path.name[5:]) for path in folder.glob("best-*"))


def test_best_adapters_are_kept_for_each_checkpoint_and_since_the_newest(tmp_path):
    """However old the oldest checkpoint: one whose adapter is exported stays to the end."""
    (found,) = run_in_group(kept_beside, tmp_path / "kept", (3, 6), world_size=1)
    assert found == [3, 6, 7, 8]


def two_sources():
    store = random_store(rows=4, seq_len=17)
    store.manifest.update(heldout_from(questions=2, letters=1))
    return store


def measure(world, base):
    """Return the losses of a fresh adapter (which changes nothing) by micro-batch and documents of
    a source at most."""
    store = two_sources()
    model = built_model(
        base, RunConfig(lora=LoraSettings(r=3, dropout=0.5)), PLAN, world,
    )  # fmt: skip
    model.training.train()
    found = {
        (size, at_most): HeldOut(
            store, every=1, num_steps=1, at_most=at_most, seed=0, micro_batch_size=size
        ).losses(model.training, world=world)
        for size, at_most in ((1, None), (2, None), (1, 1))
    }
    assert model.training.training, "training goes on as before"
    return found


def test_loss_is_that_of_the_evaluation(base):
    """Three processes have more turns than documents: some run without one. Dropout is off."""
    results = run_in_group(measure, base, world_size=3)
    model = stock_base(base)
    store = two_sources()
    documents = [store.heldout_documents()[n] for n in range(3)]
    sums = heldout_losses(model, documents, batch_size=1, device=torch.device("cpu"))

    def mean(some):
        return sum(loss for loss, _ in some) / sum(tokens for _, tokens in some)

    by_source = {"questions": mean(sums[:2]), "letters": mean(sums[2:])}
    for result in results:
        drawn = result.pop((1, 1)).by_source
        assert drawn["letters"] == pytest.approx(mean(sums[2:]), rel=1e-5)
        assert min(abs(drawn["questions"] - mean([one])) for one in sums[:2]) < 1e-5
        for found in result.values():
            assert found.whole == pytest.approx(mean(sums), rel=1e-5)
            assert found.by_source == pytest.approx(by_source, rel=1e-5)


def test_documents_fill_rows_in_their_order():
    assert heldout_rows([5, 3, 9, 1, 2], seq_len=10) == [[0, 1], [2, 3], [4]]


def test_no_document_to_measure_on_is_an_error():
    store = random_store(rows=4, seq_len=17)
    nothing = (np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.bool_), np.array([0]))
    rows = (store.input_ids, store.loss_mask, store.position_ids)
    arrays = token_arrays(*rows, heldout=nothing)
    manifest = {"seq_len": 17, "vocab_size": 211} | heldout_from()
    empty = TokenStore(manifest=manifest, arrays=arrays)
    with pytest.raises(UserError, match=r"train\.evaluate_every_steps asks for the held-out loss"):
        HeldOut(empty, every=1, num_steps=1, at_most=None, seed=0, micro_batch_size=1)
