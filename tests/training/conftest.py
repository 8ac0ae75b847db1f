"""Fixtures that several tests of training share."""

from pathlib import Path

import pytest

from tests.support.models import quantized, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test module, with a Llama of 2 layers in `original`, quantized in `nf4`."""
    folder = tmp_path_factory.mktemp("training")
    quantized(tiny_llama(folder / "original", num_hidden_layers=2), folder / "nf4")
    return folder


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """The quantized tiny Llama of the test module."""
    return folder / "nf4"
