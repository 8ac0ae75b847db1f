"""A process for recordings: whoever asks for one keeps its own torch as it is."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from workflow.lib.planning.memory.allocation_tape import Tape
from workflow.lib.recording.engine_run import Request, record


class RecordingProcess:
    """Records what it is asked for, one request after the other."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def record(self, request: Request, *, whole: bool = False) -> Tape:
        """Return the recording; arguments and errors are those of `engine_run.record`."""
        return self._executor.submit(record, request, whole=whole).result()


@contextmanager
def recording_process() -> Iterator[RecordingProcess]:
    """Start the process; end it with the block."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        yield RecordingProcess(executor)
