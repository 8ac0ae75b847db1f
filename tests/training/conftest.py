"""Fixtures that several tests of training share."""

import pytest


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    """A folder of the test module, in which `nf4` is the base."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "nf4").symlink_to(base)
    return folder
