"""Fixtures that several test modules share."""

from pathlib import Path

import pytest

from tests.workflow_project import Project, make_project


@pytest.fixture(scope="session")
def finished_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A tiny project after `snakemake all`. Never change it: work in `finished_project.copy(tmp_path)`."""
    root: Path = tmp_path_factory.mktemp("workflow") / "finished"
    project = make_project(root)
    project.run("all")
    return project
