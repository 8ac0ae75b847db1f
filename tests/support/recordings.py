"""A process for recordings, forked from one that has imported the packages."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from tests.support.distributed import fresh_processes
from workflow.lib.recording.recording_process import RecordingProcess


@contextmanager
def forked_recordings() -> Iterator[RecordingProcess]:
    """Yield the process, as `recording_process` does, which imports them: 5 s. That one is tried by
    planning/preflight/test_what_if.py."""
    with ProcessPoolExecutor(max_workers=1, mp_context=fresh_processes()) as executor:
        yield RecordingProcess(executor, processes=1)
