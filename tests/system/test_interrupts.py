"""Which jobs a failed one ends."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest

from tests.support.distributed import run_distributed, run_in_group
from tests.support.finished import CONFIG, PLAN, arguments, finetune, finished, prepare
from tests.support.models import tiny_llama
from tests.support.refusals import refusal
from workflow.lib.artifacts.checkpoint_folder import saved_steps
from workflow.lib.distributed.world import largest_of_all
from workflow.lib.export.adapter_files import read_sharded_adapter
from workflow.lib.settings.config import LoraSettings
from workflow.lib.system.checksums import read_lines
from workflow.lib.system.files import read_checked_json
from workflow.lib.system.interrupts import SIGNALS, StopRequest, end_stages

WAIT = "import signal; print(flush=True); signal.pause()"


def start(stage: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WAIT, f"workflow.scripts.{stage}", "--log", "quantize_base"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()  # it waits
    return process


def test_stages_are_ended_by_their_name_and_no_others():
    with start("quantize_base") as ended, start("finetune") as other:
        assert end_stages(["tokenize_dataset", "quantize_base"])
        assert not end_stages(["tokenize_dataset"])
        assert ended.wait() == -signal.SIGTERM
        assert other.poll() is None
        other.kill()


FEW = 4  # steps
SMALL = partial(tiny_llama, num_hidden_layers=2)


def asked_by_each(world, numbers):
    return {number: asked(number, world) for number in numbers}


def asked(number, world):
    """Process 1 alone gets a signal, between the second and the third question."""
    before = signal.SIG_DFL
    signal.signal(number, before)  # who started the tests may have had SIGHUP ignored
    with StopRequest() as stop:
        answers = [largest_of_all([stop.requested, False], world=world) for _ in range(2)]
        if world.rank == 1:
            os.kill(os.getpid(), number)
            while not stop.requested:  # any thread may be given it, at any time
                time.sleep(0.01)
        answers += [largest_of_all([stop.requested, False], world=world) for _ in range(2)]
    return {"answers": answers, "restored": signal.getsignal(number) is before}


@pytest.fixture(scope="module")
def decisions():
    return run_in_group(asked_by_each, SIGNALS, world_size=2)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_to_one_process_is_one_decision_of_all(decisions, number):
    for process in decisions:
        no, yes = [False, False], [True, False]
        assert process[number] == {"answers": [no, no, yes, yes], "restored": True}


def test_signal_that_is_ignored_stays_ignored():
    """Under nohup a lost terminal stops nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def interfere(act):
    """Have a function of the number of each step, from 1 on, and its loss look at every step of
    this process, which ends with the call; the loss that it returns counts, if any."""
    from workflow.lib.training import loop

    original = loop.check_step

    def check(loss, norm, *, step, **facts):
        said = act(step + 1, loss)
        original(loss if said is None else said, norm, step=step, **facts)

    loop.check_step = check


def stopped_after(folder, first):
    """Be a worker that asks itself to stop in its step `first`; return the exit status."""

    def stop(step, loss):
        if step == first and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)  # to this thread, so at once

    interfere(stop)
    with pytest.raises(SystemExit) as stopped:
        finetune(arguments(folder))
    return stopped.value.code


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    prepare(folder)
    assert run_distributed(stopped_after, folder, 3, world_size=2) == [os.EX_TEMPFAIL] * 2
    assert saved_steps(arguments(folder).checkpoints) == [1, 3]
    assert not (folder / "finetune").exists()
    run_distributed(finetune, arguments(folder), world_size=2)
    return folder


def test_stopped_and_repeated_run_gives_the_weights_of_an_undisturbed_one(stopped, shared_folder):
    undisturbed = finished(shared_folder)
    one, other = (read_sharded_adapter(f / "finetune" / "adapter") for f in (stopped, undisturbed))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)


def test_stopped_and_repeated_run_says_so_and_has_every_line_once(stopped):
    assert read_checked_json(stopped / "finetune" / "summary.json")["resumed_from_steps"] == [3]
    assert [row["step"] for row in read_lines(stopped / "finetune" / "metrics.jsonl")] == [1, 3, 6]


def diverging(folder):
    interfere(lambda step, loss: math.nan if step == FEW else loss)
    every = {"checkpoint_every_steps": 1, "keep_checkpoints": 9, "max_steps": FEW}
    train = CONFIG.train.model_copy(update=every)
    config = CONFIG.model_copy(update={"train": train, "lora": LoraSettings(r=2)})
    return refusal(finetune, arguments(folder), config, replace(PLAN, num_steps=FEW))


def test_diverging_run_keeps_the_checkpoint_that_was_being_written(tmp_path):
    prepare(tmp_path, model=SMALL)
    messages = run_distributed(diverging, tmp_path, world_size=2)
    assert all(message.startswith(f"step {FEW}: loss = nan") for message in messages)
    assert saved_steps(arguments(tmp_path).checkpoints) == list(range(1, FEW))


def reading_cut_tokens(folder):
    """Be a worker of a run whose tokens lose their last byte in step 3, so that it reads as zero
    from then on."""

    def cut(step, loss):
        if step == 3 and os.environ["RANK"] == "0":
            path = folder / "tokens" / "train.input_ids.npy"
            os.truncate(path, path.stat().st_size - 1)

    interfere(cut)
    return refusal(finetune, arguments(folder))


def test_nothing_is_saved_of_steps_that_may_have_read_a_cut_file(tmp_path):
    prepare(tmp_path, model=SMALL)
    messages = run_distributed(reading_cut_tokens, tmp_path, world_size=2)
    assert all("train.input_ids.npy is damaged" in message for message in messages)
    assert saved_steps(arguments(tmp_path).checkpoints) == [1]
