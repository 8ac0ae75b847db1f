"""The processes of recordings start together, and only for a recording."""

from concurrent.futures import Executor, Future

from tests.support.plans import make_plan
from workflow.lib.recording import recording_process
from workflow.lib.recording.recording_process import RecordingProcess


class Noted(Executor):
    """Notes what it is asked for, and answers None."""

    def __init__(self):
        self.asked = []

    def submit(self, function, /, *_, **__):
        self.asked.append(function)
        answer = Future()
        answer.set_result(None)
        return answer


def test_all_processes_import_the_engine_at_the_first_request():
    noted = Noted()
    recordings = RecordingProcess(noted, processes=2)
    assert recordings.peaks({}, []) == []
    assert noted.asked == [], "nothing is imported where all recordings are known"
    recordings.peaks({}, [make_plan()])
    recordings.record({}, make_plan())
    started = [recording_process._import_engine] * 2
    assert noted.asked == [*started, recording_process._peaks, recording_process._recorded]
