"""The process in which the tests of recordings record."""

from collections.abc import Iterator

import pytest

from tests.support.recordings import forked_recordings
from workflow.lib.recording.recording_process import RecordingProcess


@pytest.fixture(scope="module")
def process() -> Iterator[RecordingProcess]:
    with forked_recordings() as started:
        yield started
