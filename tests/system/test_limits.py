"""A watched process ends though its work never returns to Python, and its error says why."""

import multiprocessing
import os
import signal

import psutil  # type: ignore[import-untyped]
import pytest
from tokenizers import Tokenizer, models, normalizers

from workflow.lib.data.encoding import safe_encoder
from workflow.lib.data.tokens.process_pool import map_in_order
from workflow.lib.system import limits
from workflow.lib.system.errors import UserError
from workflow.lib.system.limits import BoundedWork

FORK = multiprocessing.get_context("fork")
HANG_S = 600.0  # a work that is never ended
MESSAGE = "the template {item} {excess}. Change it."


def endless():
    """Compare lists with 2^64 elements, in one call of C."""
    lists = [0], [0]
    for _ in range(64):
        lists = tuple([nested, nested] for nested in lists)
    return lists[0] == lists[1]


def grow():
    grown = []
    while True:
        grown.append(b"x" * 2**20)


def work(function, begun=None, *, seconds=0.05, num_bytes=2**40):
    with limits.WatchedWork(MESSAGE, "abc", seconds=seconds, num_bytes=num_bytes):
        if begun is not None:
            begun.set()
        function()


@pytest.fixture(autouse=True)
def _short_bounds(monkeypatch):
    monkeypatch.setattr(limits, "RETURN_S", 0.0)
    monkeypatch.setattr(limits, "INTERRUPT_S", 0.2)


class WatchedProcess:
    """A process in a group of its own, as a stage that a terminal interrupts."""

    def __init__(self, folder, function, *args):
        self.begun, self._error = FORK.Event(), folder / "error"
        self.process = FORK.Process(target=self._run, args=(function, args))
        self.process.start()

    def _run(self, function, args):
        os.setpgrp()
        try:
            with limits.watched(self._error.write_text):
                function(self.begun, *args)
        except (UserError, KeyboardInterrupt) as error:
            self._error.write_text(f"raised {type(error).__name__}: {error}")

    def end(self):
        """Return the exit code and the error."""
        self.process.join(HANG_S)
        code = self.process.exitcode
        if code is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        return code, self._error.read_text() if self._error.exists() else ""


def pooled(begun, function, **bounds):
    def prepare():
        return lambda task: work(function, begun, **bounds) if task else None

    list(map_in_order([0, 1, 0], prepare=prepare, processes=2, alone=0))


def test_work_within_one_call_is_ended_at_its_time(tmp_path):
    process = WatchedProcess(tmp_path, lambda begun: work(endless, begun))
    assert process.end() == (
        -signal.SIGKILL,
        "the template 'abc' takes more than 0.05 seconds of processor time. Change it.",
    )


def test_work_is_ended_at_its_memory(tmp_path):
    def growing(begun):
        work(grow, begun, seconds=1e6, num_bytes=2**26)

    code, error = WatchedProcess(tmp_path, growing).end()
    assert code == -signal.SIGKILL
    assert error == "the template 'abc' takes more than 64 MiB of memory. Change it."


def test_bounded_work_within_one_call_is_ended(tmp_path):
    def bounded(begun):
        with BoundedWork("it {excess}", max_seconds=0.05):
            endless()

    code, error = WatchedProcess(tmp_path, bounded).end()
    assert (code, error[:18]) == (-signal.SIGKILL, "it takes more than")


def test_text_that_a_tokenizer_multiplies_is_ended_at_its_memory(tmp_path, monkeypatch):
    tokenizer = Tokenizer(models.WordLevel({"e": 0}, unk_token="e"))
    longer = [normalizers.Replace("e", "e" * 30) for _ in range(8)]
    tokenizer.normalizer = normalizers.Sequence(longer)
    monkeypatch.setattr(safe_encoder, "MIN_BYTES", 2**26)
    process = WatchedProcess(tmp_path, lambda begun: safe_encoder.encoding(tokenizer, "e"))
    code, error = process.end()
    assert code == -signal.SIGKILL
    assert error.startswith("model.source: its tokenizer takes more than 64 MiB of memory for one")


def test_work_that_has_returned_is_not_ended(tmp_path):
    def returning(begun):
        work(int, begun, seconds=0.0)
        work(endless, begun, num_bytes=2**39)

    assert "0.05 seconds" in WatchedProcess(tmp_path, returning).end()[1]


def test_work_within_bounded_work_counts_to_it(tmp_path):
    def nested(begun):
        with BoundedWork("outer {excess}", max_seconds=0.1):
            with BoundedWork("inner {excess}", max_seconds=1e6):
                pass
            while True:
                pass

    # The watcher is first where Python comes to its own signal late.
    code, error = WatchedProcess(tmp_path, nested).end()
    assert error.removeprefix("raised UserError: ").startswith("outer takes more tha")
    assert code == (0 if error.startswith("raised") else -signal.SIGKILL)


def test_interrupt_ends_work_that_ignores_it(tmp_path):
    def deaf(begun):
        signal.signal(signal.SIGINT, lambda *_: None)  # else it may come just before the call
        work(endless, begun, seconds=1e6)

    process = WatchedProcess(tmp_path, deaf)
    process.begun.wait()
    os.killpg(process.process.pid, signal.SIGINT)
    assert process.end() == (-signal.SIGKILL, limits.INTERRUPTED)


def test_work_of_a_pool_is_ended_and_its_parent_raises_the_error(tmp_path):
    code, error = WatchedProcess(tmp_path, pooled, endless).end()
    assert code == 0
    assert error.startswith("raised UserError: the template 'abc' takes more than 0.05 seconds")


def test_interrupt_ends_a_pool_whose_work_ignores_it(tmp_path):
    def endless_pool(begun):
        pooled(begun, endless, seconds=1e6)

    process = WatchedProcess(tmp_path, endless_pool)
    process.begun.wait()
    os.killpg(process.process.pid, signal.SIGINT)
    assert process.end() == (0, "raised KeyboardInterrupt: ")


def watch_and_wait(begun):
    with limits.watched(print):
        begun.set()
        signal.pause()


def test_suspended_watcher_ends_with_its_stage():
    begun = FORK.Event()
    stage = FORK.Process(target=watch_and_wait, args=(begun,))
    stage.start()
    assert begun.wait(HANG_S)
    (watcher,) = psutil.Process(stage.pid).children()
    watcher.suspend()
    stage.kill()
    stage.join()
    _, alive = psutil.wait_procs([watcher], timeout=HANG_S)
    assert alive == []
