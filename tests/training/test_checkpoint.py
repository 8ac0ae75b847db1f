"""Checkpoints: a resumed run is the uninterrupted one, for any number of processes. Pickles are
never read."""

import json
import math
import pickle
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.support.checkpointing import IDENTITY, SAVED, Run
from tests.support.distributed import run_in_group
from tests.support.models import adapted, write_shards
from workflow.lib.artifacts.checkpoint_folder import saved_steps, step_dir, trained_otherwise
from workflow.lib.distributed.sharded_files import INDEX, read_index, read_whole
from workflow.lib.export.adapter_files import read_sharded_adapter
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json
from workflow.lib.training.checkpoint import CheckpointWriter, TrainingClock, save_adapter

CLOCK = TrainingClock(3.5, 7.0)


def adapter_of(checkpoints):
    return checkpoints.with_name(f"{checkpoints.name}-adapter")


def save_and_resume(world, base, folder):
    """Train without interruption, saving in the midst, and the adapter at the end; then again from
    the checkpoint, with a new model."""
    run = Run(base, world)
    writer = CheckpointWriter(folder, keep=2, identity=IDENTITY, world=world)
    steps = run.losses(first=0)
    losses = list(islice(steps, SAVED))
    writer.save(run.training, run.optimizer, step=SAVED, clock=CLOCK)
    saved = run.state()
    losses += steps  # while the checkpoint is being written
    writer.wait()
    if world.is_main:
        adapter_of(folder).mkdir()
    torch.distributed.barrier()
    save_adapter(run.training, adapter_of(folder), world=world)
    again = Run(base, world)
    found = again.resume(folder)
    step = found.step
    resumed = again.state()
    return {
        "uninterrupted": run.state(),
        "losses": losses,
        "step": step,
        "clock": found.clock,
        "saved": saved,
        "resumed": resumed,
        "late_losses": again.train(first=step),
        "final": again.state(),
    }


def resume_elsewhere(world, base, folder):
    run = Run(base, world)
    step = run.resume(folder).step
    return {"resumed": run.state(), "late_losses": run.train(first=step)}


@pytest.fixture(
    scope="module", params=[(1, 1), (4, 2)], ids=["1 process", "2 replicas on 2 processes each"]
)
def run(request, folder):
    processes, shard_size = request.param
    checkpoints = folder / f"of-{processes}"
    results = run_in_group(
        save_and_resume, folder / "nf4", checkpoints, world_size=processes, shard_size=shard_size
    )
    return results[0] | {"processes": processes, "checkpoints": checkpoints}


def assert_identical(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoint_holds_the_state_at_its_step_though_training_went_on(run):
    """Weights, both moments and the step count of AdamW."""
    assert (run["step"], run["clock"]) == (SAVED, CLOCK)
    assert {name.rpartition(".")[2] for name in run["saved"]} == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert_identical(run["resumed"], run["saved"])


def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(run):
    """Dropout included: its random numbers are a function of the step."""
    assert run["late_losses"] == run["losses"][SAVED:]
    assert_identical(run["final"], run["uninterrupted"])


def test_another_number_of_processes_continues_from_the_same_state(folder, run):
    """What follows differs by the order of sums alone (2e-5 relative is 100 units in the last
    place), as masks do not depend on processes; the state does not differ at all."""
    other = 2 if run["processes"] == 1 else 1
    results = run_in_group(resume_elsewhere, folder / "nf4", run["checkpoints"], world_size=other)
    assert_identical(results[0]["resumed"], run["saved"])
    for loss, reference in zip(results[0]["late_losses"], run["losses"][SAVED:], strict=True):
        assert loss == pytest.approx(reference, rel=2e-5)


def test_checkpoint_holds_trainable_tensors_alone(run):
    """Weights and both moments of the adapter, and nothing of the frozen model."""
    tensors = read_index(step_dir(run["checkpoints"], SAVED))["tensors"]
    sizes = [math.prod(entry["shape"]) for entry in tensors.values()]
    adapter = [t.numel() for name, t in run["saved"].items() if name.endswith(".weight")]
    assert sum(sizes) == 3 * sum(adapter) + 1  # the updates are counted


def test_index_of_a_sharded_adapter_that_was_changed_is_refused(tmp_path):
    write_shards(tmp_path, {"a.lora_B.weight": torch.ones(3, 2)})
    index = read_json(tmp_path / INDEX)
    (tmp_path / INDEX).write_text(json.dumps(index | {"processes": 2}))
    with pytest.raises(UserError, match=r"index\.json cannot be read .* SHA-256"):
        read_sharded_adapter(tmp_path)


def test_sharded_adapter_is_read_whole_without_a_process_group(folder, run):
    """Every process's part, and none of them doubled: accelerate#4206 kept that of rank 0 alone."""
    trained = {n: t for n, t in run["uninterrupted"].items() if n.endswith(".weight")}
    assert_identical(read_sharded_adapter(adapter_of(run["checkpoints"])), trained)
    assert trained.keys() == trainable_parameters(adapted(folder / "nf4", r=3)).keys()


ELASTIC_STEPS = 4
ELASTIC = RunConfig(
    lora=LoraSettings(r=3, dropout=0.1),
    train=TrainConfig(
        epochs=None, max_steps=ELASTIC_STEPS, global_batch_size=8, learning_rate=1e-2
    ),
)


def part_of_elastic_run(world, base, folder, last, to_the_end):
    """Continue to step `last` with the processes that there are, save, train on to the last step of
    all if asked, and return the losses."""
    run = Run(base, world, ELASTIC)
    first = run.resume(folder).step
    writer = CheckpointWriter(folder, keep=9, identity=IDENTITY, world=world, newest=first)
    losses = run.train(first=first, last=last)
    writer.save(run.training, run.optimizer, step=last)
    writer.wait()
    return losses + (run.train(first=last, last=ELASTIC_STEPS) if to_the_end else [])


class Bomb:
    """An object whose pickle leaves a file behind when it is read."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return Path.touch, (self._mark,)


@pytest.fixture(scope="module")
def elastic(folder):
    """Losses of 4 processes, which save a state and train on, and of 2 and then 8 that go on from
    that state, pickles beside it."""
    checkpoints, mark = folder / "elastic", folder / "exploded"
    arguments = (part_of_elastic_run, folder / "nf4", checkpoints)
    undisturbed = run_in_group(*arguments, 1, True, world_size=4)[0]
    for name in (".metadata", "__0_0.distcp", "optimizer.pt", "state.pkl"):
        (step_dir(checkpoints, 1) / name).write_bytes(pickle.dumps(Bomb(mark)))
    losses = undisturbed[:1]
    for processes, last in ((2, 2), (8, ELASTIC_STEPS)):
        losses += run_in_group(*arguments, last, False, world_size=processes)[0]
    return {
        "undisturbed": undisturbed, "losses": losses, "checkpoints": checkpoints, "mark": mark,
    }  # fmt: skip


def test_losses_of_4_then_2_then_8_processes_are_those_of_4(elastic):
    """Sums in another order, in fp32: 2e-5 relative is 100 units in the last place."""
    assert len(elastic["losses"]) == ELASTIC_STEPS
    assert elastic["losses"] == pytest.approx(elastic["undisturbed"], rel=2e-5)


def test_pickles_among_the_checkpoints_are_never_read(elastic):
    for step in (1, 2):
        read_whole(step_dir(elastic["checkpoints"], step))
    assert len([*step_dir(elastic["checkpoints"], 1).glob("*.pkl")]) == 1, "they are still there"
    assert saved_steps(elastic["checkpoints"]) == [1, 2, ELASTIC_STEPS]
    assert not elastic["mark"].exists()


def test_run_that_begins_anew_tells_of_its_other_checkpoints(tmp_path):
    folder = tmp_path / "demo-0123456789ab-111111111111"
    (tmp_path / "demo-2-0123456789ab-111111111111" / "step-00000007").mkdir(parents=True)
    assert trained_otherwise(folder) is None  # another run's
    other = tmp_path / "demo-ba9876543210-111111111111"
    (other / "step-00000007").mkdir(parents=True)
    said = trained_otherwise(folder)
    assert other.name in said
    assert "train.start_from: demo" in said
    (folder / "step-00000001").mkdir(parents=True)
    assert trained_otherwise(folder) is None
