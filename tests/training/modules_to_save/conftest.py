"""Fixtures of the tests of modules that are trained whole."""

import pytest

from tests.support.models import quantized, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the test module, with a Llama of one layer in `original`, quantized in `nf4`."""
    folder = tmp_path_factory.mktemp("modules")
    quantized(tiny_llama(folder / "original", num_hidden_layers=1, pad_token_id=5), folder / "nf4")
    return folder
