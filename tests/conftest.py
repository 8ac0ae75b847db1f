"""Fixtures that several test modules share."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.canaries import CANARIES
from tests.workflow_project import LONG, TIMEOUT_S, Project, make_project
from workflow.lib.locks import exclusive

if TYPE_CHECKING:
    from tests.tokenizing import Stage

# By falling duration, measured on two cores. Processes take whole files: a long one begun last would run alone at the end.
LONGEST_FIRST = (
    "test_workflow_run.py", "test_slurm.py", "test_readme.py", "test_launch.py", "test_workflow_errors.py",
    "test_modules_to_save.py", "test_workflow_dag.py", "test_nodes.py", "test_benchmark_run.py", "test_evaluate_run.py",
    "test_checkpoint.py", "test_training.py", "test_resources.py", "test_download_source.py", "test_harness_by_hand.py",
)  # fmt: skip


def pytest_configure() -> None:
    """Let Ctrl-C reach what the tests start: a shell makes its background jobs deaf to it, and all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; all others keep their order."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session")
def finished_project(shared_folder: Path) -> Project:
    """A tiny project after `snakemake all`, trained for `STEPS` steps; one for all processes. Never change it: work in `finished_project.copy(tmp_path)`.

    It ran with `CANARIES` in its environment; what the terminal showed is beside it, in `terminal.txt`.
    """
    root = shared_folder / "workflow" / "finished"
    terminal = root.parent / "terminal.txt"  # written last
    lock = shared_folder / "workflow.lock"
    with exclusive(lock, doing="running the whole workflow", wait_s=TIMEOUT_S):
        if not terminal.exists():
            shutil.rmtree(root, ignore_errors=True)  # of a process that failed
            project = replace(make_project(root, train=LONG), environment=CANARIES)
            terminal.write_text(project.run("all").output)
    return Project(root)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all processes of this session; theirs are in it, each in one of its own."""
    folder: Path = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer, saved once for all tests of `tokenize_dataset`."""
    from tests.tiny import tiny_tokenizer  # imports torch, which most tests do without

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(folder)
    return folder


@pytest.fixture
def stage(tmp_path: Path, tokenizer_folder: Path) -> "Stage":
    """A place to run `tokenize_dataset` in."""
    from tests.tokenizing import Stage

    return Stage(tmp_path, tokenizer_folder)
