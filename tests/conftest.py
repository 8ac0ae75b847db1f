"""Fixtures that several test modules share."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.canaries import CANARIES
from tests.workflow_project import Project, make_project


@pytest.fixture(scope="session")
def finished_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A tiny project after `snakemake all`. Never change it: work in `finished_project.copy(tmp_path)`.

    It ran with `CANARIES` in its environment; what the terminal showed is beside it, in `terminal.txt`.
    """
    root: Path = tmp_path_factory.mktemp("workflow") / "finished"
    project = replace(make_project(root), environment=CANARIES)
    done = project.run("all")
    (root.parent / "terminal.txt").write_text(done.output)
    return replace(project, environment={})
