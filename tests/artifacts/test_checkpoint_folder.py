"""A forced training begins anew, and loses nothing."""

import pytest

from workflow.lib.artifacts.checkpoint_folder import begin_anew, saved_steps
from workflow.lib.system.errors import UserError
from workflow.lib.system.locks import exclusive


@pytest.fixture
def folder(tmp_path):
    for name in ("step-00000003", "step-00000007", "best-00000003"):
        (tmp_path / "demo-1-2" / name).mkdir(parents=True)
    return tmp_path / "demo-1-2"


def test_forced_training_sets_all_checkpoints_aside_and_says_where(folder):
    (folder.parent / "demo-1-3").mkdir()  # a training that has none
    (line,) = begin_anew([folder, folder.parent / "demo-1-3"])
    aside = folder / "set-aside-1"
    assert f"the checkpoints so far are in {aside}" in line
    assert saved_steps(folder) == []
    assert saved_steps(aside) == [3, 7]
    assert (aside / "best-00000003").is_dir()
    assert [*begin_anew([folder])] == []


def test_checkpoints_of_a_training_under_way_are_not_set_aside(folder):
    holds = exclusive(folder / ".lock", doing="training this run")
    with holds, pytest.raises(UserError, match="is in use"):
        [*begin_anew([folder])]
    assert saved_steps(folder) == [3, 7]
