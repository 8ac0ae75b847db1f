"""When checkpoints are written, and that saving survives a lack of threads and files that stay."""

import errno
import logging
import shutil
import threading
import time
from unittest import mock

import pytest

from tests.support.checkpointing import IDENTITY, Run
from tests.support.distributed import run_in_group
from workflow.lib.artifacts.checkpoint_folder import saved_steps, step_dir
from workflow.lib.training.checkpoint import Cadence, CheckpointWriter


def save_when_no_thread_can_be_started(world, base, folder):
    run = Run(base, world)
    run.train(first=0, last=1)
    writer = CheckpointWriter(folder, keep=2, identity=IDENTITY, world=world)
    lack = RuntimeError("can't start new thread")
    with mock.patch.object(threading.Thread, "start", side_effect=lack):
        for step in (1, 2):
            writer.save(run.training, run.optimizer, step=step)
            writer.wait()
    return saved_steps(folder)


def test_saving_needs_no_new_thread(folder):
    """Short of memory, Python may start one that never says that it runs, and wait for ever."""
    arguments = (folder / "nf4", folder / "no-thread")
    assert run_in_group(save_when_no_thread_can_be_started, *arguments, world_size=1) == [[1, 2]]


def save_when_the_one_before_stays(world, base, folder):
    """Save three times where files of the first checkpoint cannot be removed at first."""
    mended = threading.Event()
    rmtree, messages = shutil.rmtree, CapturedMessages()

    def busy(path, **options):
        if "00000001" in path.name and list(path.glob("shard-*")) and not mended.is_set():
            next(path.glob("shard-*")).unlink()
            if not options.get("ignore_errors"):
                raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        else:
            rmtree(path, **options)

    run = Run(base, world)
    writer = CheckpointWriter(folder, keep=1, identity=IDENTITY, world=world)
    found = {"saved": []}
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

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("workflow").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("workflow").removeHandler(self)


def test_checkpoint_whose_predecessor_cannot_be_removed_is_saved(folder, tmp_path):
    """As on NFS, while a process has a file of it open. What is left is no checkpoint."""
    arguments = (folder / "nf4", tmp_path)
    main, other = run_in_group(save_when_the_one_before_stays, *arguments, world_size=2)
    for result in (main, other):
        assert result["saved"] == [[1], [2], [3]]
        assert (result["step"], result["skipped"]) == (3, [])
    (told,) = main["told"]
    assert told.startswith(f"{step_dir(tmp_path, 1)} cannot be removed (OSError: ")
    assert other["told"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def save_steps(world, base, folder, exported):
    run = Run(base, world)
    writer = CheckpointWriter(folder, keep=1, identity=IDENTITY, world=world, exported=exported)
    for step in (1, 2, 3, 4, 5):
        writer.save(run.training, run.optimizer, step=step)
        writer.wait()
    return saved_steps(folder)


def test_checkpoints_whose_adapters_are_exported_stay_beside_the_newest(folder, tmp_path):
    arguments = (folder / "nf4", tmp_path, (2, 4))
    assert run_in_group(save_steps, *arguments, world_size=1) == [[2, 4, 5]]


@pytest.mark.parametrize(
    ("step", "minutes_since", "due"),
    [(1, 0, True), (2, 0, False), (10, 0, True), (11, 4, False), (11, 6, True), (13, 0, True)],
)
def test_checkpoint_is_due_after_step_1_exported_ones_every_so_many_and_every_so_many_minutes(
    step, minutes_since, due
):
    cadence = Cadence(every_steps=10, every_minutes=5.0, exported=(13,))
    assert cadence.due(step=step, last_saved_s=time.monotonic() - 60 * minutes_since) is due


def test_checkpoints_of_more_than_eight_digits_are_found_in_order(tmp_path):
    steps = [7, 99_999_999, 100_000_000]
    for step in steps:
        step_dir(tmp_path, step).mkdir()
    assert saved_steps(tmp_path) == steps
