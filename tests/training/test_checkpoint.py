"""Checkpoints: a resumed run is the uninterrupted one; what a kill leaves is never taken for a
checkpoint.
"""

import errno
import json
import logging
import math
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.distributed import TIMEOUT_S, run_distributed
from tests.support.models import PLAN, adapted, quantized, random_store, tiny_llama, write_shards
from workflow.lib.distributed import sharded_files
from workflow.lib.distributed.sharded_files import INDEX, check_files, read_index, read_whole
from workflow.lib.distributed.stop_signals import on_any
from workflow.lib.distributed.world import World, process_group
from workflow.lib.export.adapter_files import read_sharded_adapter
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.settings.config import LoraSettings, RunConfig, TrainConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, write_checked_json
from workflow.lib.training.build import build_training_model
from workflow.lib.training.checkpoint import (
    Cadence,
    CheckpointWriter,
    Resumed,
    resume_,
    rewind_metrics,
    save_adapter,
    saved_steps,
    step_dir,
)
from workflow.lib.training.loop import make_optimizer, steps

STEPS, SAVED = 5, 3
CONFIG = RunConfig(
    lora=LoraSettings(r=3, dropout=0.1),
    train=TrainConfig(
        epochs=None, max_steps=STEPS, global_batch_size=12, learning_rate=1e-2, weight_decay=0.1
    ),
)
IDENTITY = "0123456789ab-cdef01234567"


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def whole_of(local: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded as another one is."""
    if not isinstance(like, DTensor):
        return local
    placed = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(local, like.device_mesh, like.placements, **placed)


class Run:
    """A run in this process's group: a fresh model and optimizer, trained from `first_step` on."""

    def __init__(self, base: Path, world: World, config: RunConfig = CONFIG) -> None:
        self.world, self.config = world, config
        build = {"compute_dtype": torch.float32, "attention": "sdpa"}
        self.training = build_training_model(base, config, PLAN, world, **build).training
        self.optimizer = make_optimizer(self.training, config.train)

    def train(self, *, first: int, last: int = STEPS) -> list[float]:
        loop = steps(
            self.training,
            self.optimizer,
            random_store(rows=13, seq_len=23),
            self.config.train,
            first_step=first,
            num_steps=self.config.train.max_steps,
            micro_batch_size=1,
            elapsed_s=0.0,
            world=self.world,
        )
        return [next(loop).loss for _ in range(first, last)]

    def resume(self, folder: Path, *, identity: str = IDENTITY) -> Resumed:
        return resume_(folder, self.training, self.optimizer, identity=identity, world=self.world)

    def state(self) -> dict[str, torch.Tensor]:
        params = trainable_parameters(self.training)
        found = {name: full(p) for name, p in params.items()}
        for name, param in params.items():
            for key, piece in self.optimizer.pieces(name, rank=self.world.rank).items():
                found[f"{name}.{key}"] = full(whole_of(piece.local, like=param))
        return found | {"step": self.optimizer.count.clone()}


def save_and_resume(base: Path, folder: Path, shard_size: int) -> dict[str, Any]:
    """Train without interruption, saving in the midst; then again from the checkpoint, with a new
    model.
    """
    with process_group("cpu", timeout_s=TIMEOUT_S, shard_size=shard_size) as world:
        run = Run(base, world)
        writer = CheckpointWriter(folder, keep=2, identity=IDENTITY, world=world)
        losses = run.train(first=0, last=SAVED)
        writer.save(run.training, run.optimizer, step=SAVED)
        saved = run.state()
        losses += run.train(first=SAVED)  # while the checkpoint is being written
        writer.wait()
        again = Run(base, world)
        step = again.resume(folder).step
        resumed = again.state()
        return {
            "uninterrupted": run.state(),
            "losses": losses,
            "step": step,
            "saved": saved,
            "resumed": resumed,
            "late_losses": again.train(first=step),
            "final": again.state(),
        }


def resume_elsewhere(base: Path, folder: Path) -> dict[str, Any]:
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        run = Run(base, world)
        step = run.resume(folder).step
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
    """What follows differs by the dropout of other processes alone; the state does not differ at
    all.
    """
    other = 2 if run["processes"] == 1 else 1
    results = run_distributed(
        resume_elsewhere, folder / "nf4", run["checkpoints"], world_size=other
    )
    assert_identical(results[0]["resumed"], run["saved"])
    for loss, reference in zip(results[0]["late_losses"], run["losses"][SAVED:], strict=True):
        assert loss == pytest.approx(reference, rel=0.05)


def test_checkpoint_holds_trainable_tensors_alone(run: dict[str, Any]) -> None:
    """Weights and both moments of the adapter, and nothing of the frozen model."""
    tensors = read_index(step_dir(run["checkpoints"], SAVED))["tensors"]
    sizes = [math.prod(entry["shape"]) for entry in tensors.values()]
    adapter = [t.numel() for name, t in run["saved"].items() if name.endswith(".weight")]
    assert sum(sizes) == 3 * sum(adapter) + 1  # the updates are counted


def writer_life(base: Path, folder: Path) -> dict[str, Any]:
    """Save six checkpoints in a row, asking about a stop after each as training does; then damage
    what is there.
    """
    found: dict[str, Any] = {}
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        run = Run(base, world)
        run.train(first=0, last=1)
        writer = CheckpointWriter(folder, keep=2, identity=IDENTITY, world=world)
        for step in range(1, 7):
            if step == 5 and world.is_main:
                leave_partial(folder)
            writer.save(run.training, run.optimizer, step=step)
            for _ in range(20):
                assert on_any([False], group=world.io_group) == [False]
        writer.save(run.training, run.optimizer, step=6)  # being written: no second one
        writer.wait()
        found["kept"] = saved_steps(folder)
        found["files"] = sorted(p.name for p in folder.iterdir())
        found["other run"] = refusal(folder, run)
        for damage in DAMAGES:
            copy = folder.with_name(damage.__name__)
            if world.is_main:
                shutil.copytree(folder, copy)
                damage(step_dir(copy, 6))
            torch.distributed.barrier()
            found[damage.__name__] = run.resume(copy)
        if world.is_main:
            for step in (5, 6):
                truncate(step_dir(folder, step))
        torch.distributed.barrier()
        found["all damaged"] = run.resume(folder)
        found["nothing there"] = run.resume(folder / "none")
        found["unwritable"] = unwritable(folder / "full", run)
    return found


def leave_partial(folder: Path) -> None:
    """What a killed process leaves: an unfinished write of a later step."""
    (folder / ".step-00000009.partial").mkdir()
    (folder / ".step-00000009.partial" / "__0_0.distcp").write_bytes(b"cut")
    (folder / ".step-00000005.partial").mkdir()
    (folder / ".step-00000005.partial" / "stale").touch()


def truncate(checkpoint: Path) -> None:
    data = next(checkpoint.glob("shard-00001-*"))
    data.write_bytes(data.read_bytes()[:-100])


def flip_one_bit(checkpoint: Path) -> None:
    data = next(checkpoint.glob("shard-00001-*"))
    content = bytearray(data.read_bytes())
    content[-7] ^= 4
    data.write_bytes(content)


def remove_shard(checkpoint: Path) -> None:
    next(checkpoint.glob("shard-00000-*")).unlink()


def remove_index(checkpoint: Path) -> None:
    (checkpoint / INDEX).unlink()


def cut_index(checkpoint: Path) -> None:
    (checkpoint / INDEX).write_text((checkpoint / INDEX).read_text()[:200])


def lead_out(step: Path) -> None:
    """A piece that is said to lie in a file of another folder, which no checksum covers."""
    index = read_index(step)
    entry = next(iter(index["tensors"].values()))
    entry["pieces"][0]["file"] = "../step-00000005/shard-00000-of-00002.safetensors"
    write_checked_json(step / INDEX, index)


def swap_two_pieces(step: Path) -> None:
    """All files are whole and every tensor is covered, but its rows have changed places."""
    content = read_json(step / INDEX)
    entries = content["tensors"].values()
    first, second, *_ = next(e["pieces"] for e in entries if _have_one_shape(e["pieces"]))
    first["offset"], second["offset"] = second["offset"], first["offset"]
    (step / INDEX).write_text(json.dumps(content))


def _have_one_shape(pieces: list[dict[str, Any]]) -> bool:
    return len(pieces) > 1 and len({tuple(piece["shape"]) for piece in pieces}) == 1


DAMAGES = {
    swap_two_pieces: "its content does not have the SHA-256 that it names",
    lead_out: "names a file that is not of this folder",
    truncate: "bytes instead of",
    flip_one_bit: "does not have its SHA-256",
    remove_shard: "shard-00000-of-00002.safetensors cannot be read",
    remove_index: "index.json cannot be read (FileNotFoundError",
    cut_index: "index.json cannot be read (JSONDecodeError",
}


def refusal(folder: Path, run: Run) -> str:
    try:
        run.resume(folder, identity="another")
    except UserError as error:
        return str(error)
    return "no error"


def unwritable(folder: Path, run: Run) -> str:
    """A file stands where the checkpoint's folder should."""
    if run.world.is_main:
        folder.mkdir()
    torch.distributed.barrier()
    writer = CheckpointWriter(folder, keep=1, identity=IDENTITY, world=run.world)
    writer.save(run.training, run.optimizer, step=6)
    writer.wait()
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


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ESTALE], ids=errno.errorcode.get)
def test_checkpoint_that_cannot_be_read_at_the_moment_is_not_set_aside(
    lives: list[dict[str, Any]], folder: Path, number: int
) -> None:
    """The machine lacks memory, or the network disk does not answer: the files may be sound."""
    checkpoint = step_dir(folder / "cut_index", 5)
    index, lack = read_index(checkpoint), OSError(number, "at the moment")
    for called, read in (
        ("file_sha256", lambda: check_files(checkpoint, index)),
        ("read_checked_json", lambda: read_index(checkpoint)),
    ):
        with (
            mock.patch.object(sharded_files, called, side_effect=lack),
            pytest.raises(OSError, match="at the moment"),
        ):
            read()


def test_newest_checkpoints_are_kept_and_no_other(lives: list[dict[str, Any]]) -> None:
    for life in lives:
        assert life["kept"] == [5, 6]


def test_unfinished_folder_of_a_killed_process_is_removed(
    folder: Path, lives: list[dict[str, Any]]
) -> None:
    assert not (step_dir(folder / "life", 5) / "stale").exists()
    assert lives[0]["files"] == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_checkpoint_is_named_and_the_one_before_is_taken_by_all_processes(
    lives: list[dict[str, Any]], damage: Callable[[Path], None]
) -> None:
    for life in lives:
        resumed = life[damage.__name__]
        assert resumed.step == 5
        (skipped,) = resumed.skipped
        assert skipped["step"] == 6
        assert DAMAGES[damage] in skipped["reason"]


def test_damaged_checkpoint_is_out_of_the_way_of_the_next_of_its_step(
    folder: Path, lives: list[dict[str, Any]]
) -> None:
    assert saved_steps(folder / "truncate") == [5]
    assert (folder / "truncate" / ".step-00000006.damaged").is_dir()


def test_run_without_a_whole_checkpoint_begins_anew_and_says_which_were_damaged(
    lives: list[dict[str, Any]],
) -> None:
    for life in lives:
        assert life["all damaged"].step == 0
        assert [skipped["step"] for skipped in life["all damaged"].skipped] == [6, 5]


def test_checkpoint_of_another_run_is_refused(folder: Path, lives: list[dict[str, Any]]) -> None:
    for life in lives:
        assert life["other run"] == (
            f"checkpoint {step_dir(folder / 'life', 6)} is that of step 6 of {IDENTITY}, this run "
            "is another: its "
            "settings, data or base differ. Move the folder away to continue from the one before "
            "it."
        )


def test_run_without_checkpoints_begins_at_step_0(lives: list[dict[str, Any]]) -> None:
    assert all(life["nothing there"].step == 0 for life in lives)


def test_checkpoint_that_cannot_be_written_stops_all_processes_with_the_cause(
    folder: Path, lives: list[dict[str, Any]]
) -> None:
    for life in lives:
        assert life["unwritable"].startswith(
            f"the checkpoint after step 7 cannot be written to {folder / 'life' / 'full'} "
            "(FileExistsError: "
        )
        assert "that of step 6 is kept" in life["unwritable"]
        assert "continues from the last checkpoint" in life["unwritable"]


def save_when_no_thread_can_be_started(base: Path, folder: Path) -> list[int]:
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        run = Run(base, world)
        run.train(first=0, last=1)
        writer = CheckpointWriter(folder, keep=2, identity=IDENTITY, world=world)
        lack = RuntimeError("can't start new thread")
        with mock.patch.object(threading.Thread, "start", side_effect=lack):
            for step in (1, 2):
                writer.save(run.training, run.optimizer, step=step)
                writer.wait()
        return saved_steps(folder)


def test_saving_needs_no_new_thread(folder: Path) -> None:
    """Short of memory, Python may start one that never says that it runs, and wait for ever."""
    arguments = (folder / "nf4", folder / "no-thread")
    assert run_distributed(save_when_no_thread_can_be_started, *arguments, world_size=1) == [[1, 2]]


def save_both(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        run = Run(base, world)
        run.train(first=0, last=2)
        if world.is_main:
            folder.mkdir()
        torch.distributed.barrier()
        save_adapter(run.training, folder, world=world)
        return {name: full(p) for name, p in trainable_parameters(run.training).items()}


def test_index_of_a_sharded_adapter_that_was_changed_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a.lora_B.weight": torch.ones(3, 2)})
    index = read_json(tmp_path / INDEX)
    (tmp_path / INDEX).write_text(json.dumps(index | {"processes": 2}))
    with pytest.raises(UserError, match=r"index\.json cannot be read .* SHA-256"):
        read_sharded_adapter(tmp_path)


def test_sharded_adapter_is_read_whole_without_a_process_group(folder: Path) -> None:
    """Every process's part, and none of them doubled: accelerate#4206 kept that of rank 0 alone."""
    gathered, _ = run_distributed(save_both, folder / "nf4", folder / "adapter", world_size=2)
    assert_identical(read_sharded_adapter(folder / "adapter"), gathered)
    assert gathered.keys() == trainable_parameters(adapted(folder / "nf4", r=3)).keys()


ELASTIC = RunConfig(
    lora=LoraSettings(r=3),
    train=TrainConfig(epochs=None, max_steps=6, global_batch_size=8, learning_rate=1e-2),
)


def part_of_elastic_run(base: Path, folder: Path, last: int) -> list[float]:
    """Continue to step `last` with the processes that there are, save, and return the losses."""
    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        run = Run(base, world, ELASTIC)
        first = run.resume(folder).step
        writer = CheckpointWriter(folder, keep=9, identity=IDENTITY, world=world, newest=first)
        losses = run.train(first=first, last=last)
        writer.save(run.training, run.optimizer, step=last)
        writer.wait()
        return losses


def test_losses_of_4_then_2_then_8_processes_are_those_of_4(folder: Path) -> None:
    """Sums in another order, in fp32: 2e-5 relative is 100 units in the last place. No dropout,
    which is per process.
    """
    undisturbed = run_distributed(
        part_of_elastic_run, folder / "nf4", folder / "four", 6, world_size=4
    )[0]
    losses = []
    for processes, last in ((4, 2), (2, 4), (8, 6)):
        results = run_distributed(
            part_of_elastic_run, folder / "nf4", folder / "elastic", last, world_size=processes
        )
        losses += results[0]
    assert losses == pytest.approx(undisturbed, rel=2e-5)


def save_when_the_one_before_stays(base: Path, folder: Path) -> dict[str, Any]:
    """Save three times where files of the first checkpoint cannot be removed at first."""
    mended = threading.Event()
    rmtree, messages = shutil.rmtree, CapturedMessages()

    def busy(path: Path, **options: Any) -> None:
        if "00000001" in path.name and list(path.glob("shard-*")) and not mended.is_set():
            next(path.glob("shard-*")).unlink()
            if not options.get("ignore_errors"):
                raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        else:
            rmtree(path, **options)

    with process_group("cpu", timeout_s=TIMEOUT_S) as world:
        run = Run(base, world)
        writer = CheckpointWriter(folder, keep=1, identity=IDENTITY, world=world)
        found: dict[str, Any] = {"saved": []}
        with mock.patch.object(shutil, "rmtree", busy), messages:
            for step in (1, 2, 3):
                if step == 3:
                    mended.set()
                writer.save(run.training, run.optimizer, step=step)
                writer.wait()
                found["saved"].append(saved_steps(folder))
        resumed = Run(base, world).resume(folder)
        return found | {"step": resumed.step, "skipped": resumed.skipped, "told": messages.texts}


class CapturedMessages(logging.Handler):
    """Context manager that collects the workflow's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> "CapturedMessages":
        logging.getLogger("workflow").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("workflow").removeHandler(self)


def test_checkpoint_whose_predecessor_cannot_be_removed_is_saved(
    folder: Path, tmp_path: Path
) -> None:
    """As on NFS, while a process has a file of it open. What is left is no checkpoint."""
    arguments = (folder / "nf4", tmp_path)
    main, other = run_distributed(save_when_the_one_before_stays, *arguments, world_size=2)
    for result in (main, other):
        assert result["saved"] == [[1], [2], [3]]
        assert (result["step"], result["skipped"]) == (3, [])
    (told,) = main["told"]
    assert told.startswith(f"{step_dir(tmp_path, 1)} cannot be removed (OSError: ")
    assert other["told"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


class Bomb:
    """An object whose pickle leaves a file behind when it is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


def test_pickles_among_the_checkpoints_are_never_read(folder: Path, tmp_path: Path) -> None:
    checkpoints, mark = tmp_path / "checkpoints", tmp_path / "exploded"
    run_distributed(part_of_elastic_run, folder / "nf4", checkpoints, 1, world_size=2)
    for name in (".metadata", "__0_0.distcp", "optimizer.pt", "state.pkl"):
        (step_dir(checkpoints, 1) / name).write_bytes(pickle.dumps(Bomb(mark)))
    run_distributed(part_of_elastic_run, folder / "nf4", checkpoints, 2, world_size=1)
    read_whole(step_dir(checkpoints, 2))
    assert saved_steps(checkpoints) == [1, 2]
    assert not mark.exists()


def test_no_module_reads_pickles() -> None:
    """torch.load, pickle and torch's distributed checkpoint files, which keep their metadata as a
    pickle.
    """
    root = Path(__file__).parents[2] / "workflow"
    reading = re.compile(
        r"torch\.load\(|\bpickle\.load|import "
        r"pickle|allow_pickle=True|FileSystemReader|dcp\.load|joblib"
    )
    found = [path for path in root.rglob("*.py") if reading.search(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("step", "minutes_since", "due"),
    [(1, 0, True), (2, 0, False), (10, 0, True), (11, 4, False), (11, 6, True)],
)
def test_checkpoint_is_due_after_step_1_every_so_many_steps_and_every_so_many_minutes(
    step: int, minutes_since: float, due: bool
) -> None:
    cadence = Cadence(every_steps=10, every_minutes=5.0)
    assert cadence.due(step=step, last_saved_s=time.monotonic() - 60 * minutes_since) is due


def test_metrics_are_restored_from_the_checkpoints_own_copy(tmp_path: Path) -> None:
    """After a power cut the lines written since may be lost, or all of them."""
    path, copy = tmp_path / "metrics.jsonl", tmp_path / "copy.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    path.write_text("\0" * 50)
    assert rewind_metrics(path, step=4, source=copy) == METRICS[:3]
    assert [json.loads(line) for line in path.read_text().splitlines()] == METRICS[:3]


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
