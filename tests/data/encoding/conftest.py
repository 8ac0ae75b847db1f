"""Fixtures that several tests of encoding share."""

import pytest

from tests.support.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
