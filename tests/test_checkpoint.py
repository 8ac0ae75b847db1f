"""Checkpoints: a resumed run is the uninterrupted one; what a kill leaves is never taken for a checkpoint."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.distributed import run_distributed
from tests.models import adapted, quantized, random_store, tiny_llama
from workflow.lib.checkpoint import (
    CheckpointWriter,
    exclusive,
    resume_,
    rewind_metrics,
    save_adapter,
    saved_steps,
    step_dir,
)
from workflow.lib.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.errors import UserError
from workflow.lib.export import read_sharded_adapter
from workflow.lib.lora import trainable_parameters
from workflow.lib.parallel import World, process_group
from workflow.lib.setup import build_training_model
from workflow.lib.stopping import StopRequest
from workflow.lib.training import make_optimizer, steps

STEPS, SAVED = 5, 3
CONFIG = RunConfig(
    lora=LoraSettings(r=3, dropout=0.1),
    train=TrainConfig(epochs=None, max_steps=STEPS, global_batch_size=12, learning_rate=1e-2, weight_decay=0.1),
)  # fmt: skip
PLAN = {"activation_checkpointing": True, "reshard_after_forward": True, "gpu_memory_bytes": None}


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


class Run:
    """A run in this process's group: a fresh model and optimizer, trained from `first_step` on."""

    def __init__(self, base: Path, world: World) -> None:
        self.world = world
        build = {"compute_dtype": torch.float32, "attention": "sdpa"}
        self.training = build_training_model(base, CONFIG, PLAN, world, **build).training
        self.optimizer = make_optimizer(self.training, CONFIG.train, device=world.device)

    def train(self, *, first: int, last: int = STEPS) -> list[float]:
        loop = steps(
            self.training, self.optimizer, random_store(rows=13, seq_len=23), CONFIG.train,
            first_step=first, num_steps=STEPS, micro_batch_size=1, elapsed_s=0.0, world=self.world,
        )  # fmt: skip
        return [next(loop).loss for _ in range(first, last)]

    def state(self) -> dict[str, torch.Tensor]:
        params = trainable_parameters(self.training)
        found = {name: full(p) for name, p in params.items()}
        for name, param in params.items():
            found |= {f"{name}.{key}": full(t) for key, t in self.optimizer.state[param].items()}
        return found


def save_and_resume(base: Path, folder: Path, shard_size: int) -> dict[str, Any]:
    """Train without interruption, saving in the midst; then again from the checkpoint, with a new model."""
    with process_group("cpu", timeout_s=60, shard_size=shard_size) as world:
        run = Run(base, world)
        writer = CheckpointWriter(folder, keep=2, world=world)
        losses = run.train(first=0, last=SAVED)
        writer.save(run.training, run.optimizer, step=SAVED)
        saved = run.state()
        losses += run.train(first=SAVED)  # while the checkpoint is being written
        writer.wait()
        again = Run(base, world)
        step = resume_(folder, again.training, again.optimizer, world=world)
        resumed = again.state()
        return {
            "uninterrupted": run.state(), "losses": losses, "step": step, "saved": saved, "resumed": resumed,
            "late_losses": again.train(first=step), "final": again.state(),
        }  # fmt: skip


def resume_elsewhere(base: Path, folder: Path) -> dict[str, Any]:
    with process_group("cpu", timeout_s=60) as world:
        run = Run(base, world)
        step = resume_(folder, run.training, run.optimizer, world=world)
        return {"resumed": run.state(), "late_losses": run.train(first=step), "final": run.state()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    quantized(tiny_llama(folder / "original"), folder / "nf4")
    return folder


@pytest.fixture(
    scope="module",
    params=[(1, 1), (2, 2), (4, 2)],
    ids=["1 process", "2 processes", "2 replicas on 2 processes each"],
)
def run(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    processes, shard_size = request.param
    checkpoints = folder / f"of-{processes}"
    results = run_distributed(
        save_and_resume, folder / "nf4", checkpoints, shard_size, world_size=processes
    )
    return results[0] | {"processes": processes, "checkpoints": checkpoints}


def assert_identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoint_holds_the_state_at_its_step_though_training_went_on(
    run: dict[str, Any],
) -> None:
    """Weights, both moments and the step count of AdamW."""
    assert run["step"] == SAVED
    assert {name.rpartition(".")[2] for name in run["saved"]} == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    assert_identical(run["resumed"], run["saved"])


def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(run: dict[str, Any]) -> None:
    """Dropout included: its random numbers are a function of the step."""
    assert run["late_losses"] == run["losses"][SAVED:]
    assert_identical(run["final"], run["uninterrupted"])


def test_another_number_of_processes_continues_from_the_same_state(
    folder: Path, run: dict[str, Any]
) -> None:
    """What follows differs by the dropout of other processes alone; the state does not differ at all."""
    other = 2 if run["processes"] == 1 else 1
    results = run_distributed(
        resume_elsewhere, folder / "nf4", run["checkpoints"], world_size=other
    )
    assert_identical(results[0]["resumed"], run["saved"])
    for loss, reference in zip(results[0]["late_losses"], run["losses"][SAVED:], strict=True):
        assert loss == pytest.approx(reference, rel=0.05)


def test_checkpoint_holds_trainable_tensors_alone(run: dict[str, Any]) -> None:
    """Weights and both moments of the adapter, and nothing of the frozen model."""
    reader = FileSystemReader(step_dir(run["checkpoints"], SAVED))
    entries = reader.read_metadata().state_dict_metadata
    sizes = [e.size.numel() for e in entries.values() if isinstance(e, TensorStorageMetadata)]
    adapter = [t.numel() for name, t in run["saved"].items() if name.endswith(".weight")]
    step_counts = len(adapter) + 1  # AdamW's, and the run's
    assert sum(sizes) == 3 * sum(adapter) + step_counts


def writer_life(base: Path, folder: Path) -> dict[str, Any]:
    """Save six checkpoints in a row, asking about a stop after each as training does; then damage what is there."""
    found: dict[str, Any] = {}
    with process_group("cpu", timeout_s=60) as world:
        run = Run(base, world)
        run.train(first=0, last=1)
        writer = CheckpointWriter(folder, keep=2, world=world)
        with StopRequest(world.io_group) as stop:
            for step in range(1, 7):
                if step == 5 and world.is_main:
                    leave_partial(folder)
                writer.save(run.training, run.optimizer, step=step)
                for _ in range(20):
                    assert not stop.agreed()
        found["before waiting"] = saved_steps(folder)
        writer.wait()
        writer.save(run.training, run.optimizer, step=6)  # there already: no second write
        writer.wait()
        found["kept"] = saved_steps(folder)
        found["files"] = sorted(p.name for p in folder.iterdir())
        torch.distributed.barrier()
        for damage in (truncate, remove_metadata):
            if world.is_main:
                damage(step_dir(folder, 6))
            torch.distributed.barrier()
            found[damage.__name__] = refusal(folder, run)
        if world.is_main:
            shutil.rmtree(step_dir(folder, 6))
        torch.distributed.barrier()
        found["after deletion"] = resume_(folder, run.training, run.optimizer, world=world)
        found["nothing there"] = resume_(folder / "none", run.training, run.optimizer, world=world)
        found["unwritable"] = unwritable(folder / "full", run)
    return found


def leave_partial(folder: Path) -> None:
    """What a killed process leaves: an unfinished write of a later step."""
    (folder / ".step-00000009.partial").mkdir()
    (folder / ".step-00000009.partial" / "__0_0.distcp").write_bytes(b"cut")
    (folder / ".step-00000005.partial").mkdir()
    (folder / ".step-00000005.partial" / "stale").touch()


def truncate(checkpoint: Path) -> None:
    data = next(checkpoint.glob("__*_0.distcp"))
    data.write_bytes(data.read_bytes()[:-100])


def remove_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()


def refusal(folder: Path, run: Run) -> str:
    try:
        resume_(folder, run.training, run.optimizer, world=run.world)
    except UserError as error:
        return str(error)
    return "no error"


def unwritable(folder: Path, run: Run) -> str:
    """A file stands where the checkpoint's folder should."""
    if run.world.is_main:
        folder.mkdir()
    torch.distributed.barrier()
    writer = CheckpointWriter(folder, keep=1, world=run.world)
    if run.world.is_main:
        (folder / ".step-00000007.partial").touch()
    try:
        writer.save(run.training, run.optimizer, step=7)
        writer.wait()
    except UserError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def lives(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(writer_life, folder / "nf4", folder / "life", world_size=2)


def test_newest_checkpoints_are_kept_and_no_other(lives: list[dict[str, Any]]) -> None:
    for life in lives:
        assert life["kept"] == [5, 6]


def test_write_in_progress_is_no_checkpoint_yet(lives: list[dict[str, Any]]) -> None:
    assert all(life["before waiting"] == [4, 5] for life in lives)


def test_unfinished_folder_of_a_killed_process_is_overwritten_or_ignored(
    folder: Path, lives: list[dict[str, Any]]
) -> None:
    assert not (step_dir(folder / "life", 5) / "stale").exists()
    assert lives[0]["files"] == [".step-00000009.partial", "step-00000005", "step-00000006"]


@pytest.mark.parametrize("damage", ["truncate", "remove_metadata"])
def test_damaged_checkpoint_is_refused_by_all_processes_with_what_to_do(
    folder: Path, lives: list[dict[str, Any]], damage: str
) -> None:
    for life in lives:
        assert life[damage].startswith(
            f"checkpoint {step_dir(folder / 'life', 6)} cannot be read ("
        )
        assert life[damage].endswith("Delete this folder to continue from the one before it.")
        assert "Traceback" not in life[damage]


def test_deleting_the_damaged_one_continues_from_the_one_before(
    lives: list[dict[str, Any]],
) -> None:
    assert all(life["after deletion"] == 5 for life in lives)


def test_run_without_checkpoints_begins_at_step_0(lives: list[dict[str, Any]]) -> None:
    assert all(life["nothing there"] == 0 for life in lives)


def test_checkpoint_that_cannot_be_written_stops_all_processes_with_the_cause(
    folder: Path, lives: list[dict[str, Any]]
) -> None:
    for life in lives:
        assert life["unwritable"].startswith(
            f"the checkpoint after step 7 cannot be written to {folder / 'life' / 'full'} (FileExistsError: "
        )
        assert "continues from the one before" in life["unwritable"]


def save_both(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    with process_group("cpu", timeout_s=60) as world:
        run = Run(base, world)
        run.train(first=0, last=2)
        save_adapter(run.training, folder, world=world)
        return {name: full(p) for name, p in trainable_parameters(run.training).items()}


def test_sharded_adapter_is_read_whole_without_a_process_group(folder: Path) -> None:
    """Every process's part, and none of them doubled: accelerate#4206 kept that of rank 0 alone."""
    gathered, _ = run_distributed(save_both, folder / "nf4", folder / "adapter", world_size=2)
    assert_identical(read_sharded_adapter(folder / "adapter"), gathered)
    assert gathered.keys() == trainable_parameters(adapted(folder / "nf4", r=3)).keys()


HOLDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from workflow.lib.checkpoint import exclusive
with exclusive(Path({folder!r})):
    print("held", flush=True)
    time.sleep(60)
"""


def test_second_process_of_a_run_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    """The kernel frees the lock, whatever kills the process."""
    root = str(Path(__file__).parents[1])
    script = HOLDER.format(root=root, folder=str(tmp_path / "checkpoints"))
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError) as caught, exclusive(tmp_path / "checkpoints"):
            pass
        assert str(caught.value) == (
            f"{tmp_path / 'checkpoints'} is in use: process {holder.pid} is training this run. Wait for it, or stop "
            "it, and repeat the command; it continues from the last checkpoint."
        )
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with exclusive(tmp_path / "checkpoints"):
        assert re.fullmatch(r"\d+", (tmp_path / "checkpoints" / ".lock").read_text())


def test_lock_is_free_again_after_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with exclusive(tmp_path):
            time.sleep(0)


METRICS = [{"step": step, "loss": step / 7} for step in (1, 2, 4, 6)]


def test_metrics_are_rewound_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    assert rewind_metrics(path, step=4) == METRICS[:3]
    assert [json.loads(line) for line in path.read_text().splitlines()] == METRICS[:3]


@pytest.mark.parametrize("cut", ['{"step": 7, "lo', "", "\n", '{"step": 7'])
def test_line_cut_by_a_kill_is_dropped(tmp_path: Path, cut: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in METRICS) + cut)
    assert rewind_metrics(path, step=99) == METRICS


def test_metrics_of_a_fresh_run_are_empty(tmp_path: Path) -> None:
    assert rewind_metrics(tmp_path / "metrics.jsonl", step=0) == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_steps_are_read_from_whole_folders_alone(tmp_path: Path) -> None:
    for name in (
        "step-00000010",
        "step-00000002",
        ".step-00000011.partial",
        "step-7",
        "step-00000003.old",
    ):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == [2, 10]
    assert saved_steps(tmp_path / "none") == []
    assert step_dir(tmp_path, 2).name == "step-00000002"
