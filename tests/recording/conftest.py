"""The process in which the tests of recordings record."""

import pytest

from tests.support.recordings import forked_recordings


@pytest.fixture(scope="module")
def process():
    with forked_recordings() as started:
        yield started
