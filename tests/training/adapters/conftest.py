"""Fixtures of the tests of adapters."""

import pytest

from tests.support.adapter_kinds import make_bases


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    """The folder of `make_bases`. Never change what is there."""
    return make_bases(tmp_path_factory.mktemp("adapters"))
