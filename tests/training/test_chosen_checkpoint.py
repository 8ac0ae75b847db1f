"""A run goes back to the checkpoint that the user names, and loses nothing by it."""

import shutil

import pytest

from tests.support.distributed import run_distributed
from tests.support.finished import STEPS, arguments, finetune, finished
from tests.support.refusals import refusal
from tests.system.test_checksums import flip
from workflow.lib.artifacts.checkpoint_folder import saved_steps
from workflow.lib.export.adapter_files import read_sharded_adapter
from workflow.lib.system.checksums import read_lines
from workflow.lib.system.files import file_sha256, read_checked_json
from workflow.lib.training.chosen_checkpoint import go_back

SAVED = 4  # the checkpoint before the last


@pytest.fixture
def ended(shared_folder, tmp_path):
    """Checkpoints and results of a run that came to its end."""
    run = finished(shared_folder)
    shutil.copytree(arguments(run).checkpoints, tmp_path / "demo-0123456789ab")
    shutil.copytree(run / "finetune", tmp_path / "finetune")
    for step in (2, STEPS):
        (tmp_path / "demo-0123456789ab" / f"best-{step:08d}").mkdir()
        (tmp_path / "demo-0123456789ab" / f"best-{step:08d}" / "index.json").write_text("{}")
    return tmp_path


def contents(folder):
    """Return the SHA-256 of every file by its name and folder; that of the history changes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "history.jsonl")
    return sorted((path.name, path.parent.name, file_sha256(path)) for path in files)


def went_back(folder, step=SAVED):
    go_back(folder / "demo-0123456789ab", step, results=folder / "finetune")


def test_what_came_later_is_in_one_folder_and_all_files_are_still_there(ended):
    before = contents(ended)
    went_back(ended)
    assert contents(ended) == before
    checkpoints = ended / "demo-0123456789ab"
    assert saved_steps(checkpoints) == [SAVED]
    aside = {path.name for path in (checkpoints / "set-aside-1").iterdir()}
    assert aside == {"finetune", "step-00000007", "best-00000007"}
    assert (checkpoints / "best-00000002").is_dir()


def test_run_goes_on_from_there_to_the_same_adapter_and_says_that_it_went_back(
    shared_folder, ended
):
    went_back(ended)
    args = arguments(finished(shared_folder))
    args.checkpoints, args.output = ended / "demo-0123456789ab", ended / "finetune"
    args.tracking_folder = ended
    run_distributed(finetune, args, world_size=2)
    summary = read_checked_json(ended / "finetune" / "summary.json")
    assert (summary["resumed_from_steps"], summary["returns"]) == ([SAVED], [[STEPS, SAVED]])
    again = read_sharded_adapter(ended / "finetune" / "adapter")
    before = read_sharded_adapter(ended / "demo-0123456789ab/set-aside-1/finetune/adapter")
    assert again.keys() == before.keys()
    assert all(again[name].equal(before[name]) for name in before)
    went_back(ended)
    assert (ended / "demo-0123456789ab" / "set-aside-2" / "finetune").is_dir()


def damage(folder):
    flip(next((folder / "demo-0123456789ab" / f"step-{SAVED:08d}").glob("shard-*")), -1)


def empty(folder):
    for path in (folder / "demo-0123456789ab").glob("step-*"):
        shutil.rmtree(path)


@pytest.mark.parametrize(
    ("step", "prepare", "said"),
    [
        (5, lambda folder: None, "rewind = 5: {} has no checkpoint of it, only those of steps 4"),
        (5, empty, "rewind = 5: {} has no checkpoints. Train the run first."),
        (STEPS, lambda folder: None, "rewind = 7: it is the newest checkpoint"),
        (SAVED, damage, "rewind = 4: this checkpoint is damaged (shard-0000"),
    ],
    ids=["no checkpoint", "none at all", "newest", "damaged"],
)
def test_refused_return_changes_nothing(ended, step, prepare, said):
    prepare(ended)
    before = contents(ended)
    assert refusal(went_back, ended, step).startswith(said.format(ended / "demo-0123456789ab"))
    assert contents(ended) == before
    history = read_lines(ended / "demo-0123456789ab" / "history.jsonl")
    assert [row["first_step"] for row in history] == [0]
