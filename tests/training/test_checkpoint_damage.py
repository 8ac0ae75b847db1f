"""Damaged, foreign and unwritable checkpoints; what a kill leaves is never taken for one."""

import errno
import json
import shutil
from unittest import mock

import pytest
import torch

from tests.support.checkpointing import IDENTITY, Run
from tests.support.distributed import run_in_group
from tests.support.refusals import refusal
from workflow.lib.artifacts.checkpoint_folder import saved_steps, step_dir
from workflow.lib.distributed import sharded_files
from workflow.lib.distributed.sharded_files import INDEX, check_files, read_index
from workflow.lib.distributed.world import largest_of_all
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import read_json, write_checked_json
from workflow.lib.training.checkpoint import CheckpointWriter


def writer_life(world, base, folder):
    """Save six checkpoints in a row, asking about a stop after each as training does; then damage
    what is there."""
    found = {}
    run = Run(base, world)
    run.train(first=0, last=1)
    writer = CheckpointWriter(folder, keep=2, identity=IDENTITY, world=world)
    for step in range(1, 7):
        if step == 5 and world.is_main:
            leave_partial(folder)
        writer.save(run.training, run.optimizer, step=step)
        for _ in range(20):
            assert largest_of_all([0], world=world) == [0]
    writer.save(run.training, run.optimizer, step=6)  # being written: no second one
    writer.wait()
    found["kept"] = saved_steps(folder)
    found["files"] = sorted(p.name for p in folder.iterdir())
    found["other run"] = refusal(run.resume, folder, identity="another")
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


def leave_partial(folder):
    """What a killed process leaves: an unfinished write of a later step."""
    (folder / ".step-00000009.partial").mkdir()
    (folder / ".step-00000009.partial" / "__0_0.distcp").write_bytes(b"cut")
    (folder / ".step-00000005.partial").mkdir()
    (folder / ".step-00000005.partial" / "stale").touch()


def truncate(checkpoint):
    data = next(checkpoint.glob("shard-00001-*"))
    data.write_bytes(data.read_bytes()[:-100])


def flip_one_bit(checkpoint):
    data = next(checkpoint.glob("shard-00001-*"))
    content = bytearray(data.read_bytes())
    content[-7] ^= 4
    data.write_bytes(content)


def remove_shard(checkpoint):
    next(checkpoint.glob("shard-00000-*")).unlink()


def remove_index(checkpoint):
    (checkpoint / INDEX).unlink()


def cut_index(checkpoint):
    (checkpoint / INDEX).write_text((checkpoint / INDEX).read_text()[:200])


def lead_out(step):
    """A piece that is said to lie in a file of another folder, which no checksum covers."""
    index = read_index(step)
    entry = next(iter(index["tensors"].values()))
    entry["pieces"][0]["file"] = "../step-00000005/shard-00000-of-00002.safetensors"
    write_checked_json(step / INDEX, index)


def swap_two_pieces(step):
    """All files are whole and every tensor is covered, but its rows have changed places."""
    content = read_json(step / INDEX)
    entries = content["tensors"].values()
    first, second, *_ = next(e["pieces"] for e in entries if _have_one_shape(e["pieces"]))
    first["offset"], second["offset"] = second["offset"], first["offset"]
    (step / INDEX).write_text(json.dumps(content))


def _have_one_shape(pieces):
    return len(pieces) > 1 and len({tuple(piece["shape"]) for piece in pieces}) == 1


DAMAGES = {
    swap_two_pieces: "does not have the SHA-256 that it names",
    lead_out: "names a file that is not of this folder",
    truncate: "bytes instead of",
    flip_one_bit: "does not have its SHA-256",
    remove_shard: "shard-00000-of-00002.safetensors cannot be read",
    remove_index: "index.json cannot be read (FileNotFoundError",
    cut_index: "index.json cannot be read (JSONDecodeError",
}


def unwritable(folder, run):
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
def lives(folder):
    return run_in_group(writer_life, folder / "nf4", folder / "life", world_size=2)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ESTALE], ids=errno.errorcode.get)
def test_checkpoint_that_cannot_be_read_at_the_moment_is_not_set_aside(lives, folder, number):
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


def test_newest_checkpoints_are_kept_and_no_other(lives):
    for life in lives:
        assert life["kept"] == [5, 6]


def test_unfinished_folder_of_a_killed_process_is_removed(folder, lives):
    assert not (step_dir(folder / "life", 5) / "stale").exists()
    assert lives[0]["files"] == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_checkpoint_is_named_and_the_one_before_is_taken_by_all_processes(lives, damage):
    for life in lives:
        resumed = life[damage.__name__]
        assert resumed.step == 5
        (skipped,) = resumed.skipped
        assert skipped["step"] == 6
        assert DAMAGES[damage] in skipped["reason"]


def test_damaged_checkpoint_is_out_of_the_way_of_the_next_of_its_step(folder, lives):
    assert saved_steps(folder / "truncate") == [5]
    assert (folder / "truncate" / ".step-00000006.damaged").is_dir()


def test_run_without_a_whole_checkpoint_begins_anew_and_says_which_were_damaged(lives):
    for life in lives:
        assert life["all damaged"].step == 0
        assert [skipped["step"] for skipped in life["all damaged"].skipped] == [6, 5]


def test_checkpoint_of_another_run_is_refused(folder, lives):
    for life in lives:
        assert life["other run"] == (
            f"checkpoint {step_dir(folder / 'life', 6)} is that of step 6 of {IDENTITY}, this run "
            "is another: its settings, data or base differ. Move the folder away to continue from "
            "the one before it."
        )


def test_run_without_checkpoints_begins_at_step_0(lives):
    assert all(life["nothing there"].step == 0 for life in lives)


def test_checkpoint_that_cannot_be_written_stops_all_processes_with_the_cause(folder, lives):
    for life in lives:
        assert life["unwritable"].startswith(
            f"the checkpoint after step 7 cannot be written to {folder / 'life' / 'full'} "
            "(FileExistsError: "
        )
        assert "that of step 6 is kept" in life["unwritable"]
        assert "continues from the last checkpoint" in life["unwritable"]
