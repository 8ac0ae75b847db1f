"""Fixtures that several tests of training share."""

import pytest

from tests.support.models import quantized, tiny_llama


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A Llama of 2 layers in NF4, one for all test modules. Never change it."""
    folder = tmp_path_factory.mktemp("training")
    return quantized(tiny_llama(folder / "original", num_hidden_layers=2), folder / "nf4")


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    """A folder of the test module, in which `nf4` is the base."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "nf4").symlink_to(base)
    return folder
