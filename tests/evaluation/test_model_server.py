"""A server as a process: what it says is passed on, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import fake_vllm
from tests.support.fake_vllm import fake_python
from workflow.lib.evaluation.llama_cpp_server import LlamaCppServer, LlamaCppStart
from workflow.lib.evaluation.model_server import BASE, running
from workflow.lib.evaluation.vllm_server import VllmServer, VllmStart
from workflow.lib.system.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """How `fake_vllm` is started; its processes are in the file `pids`."""
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(tmp_path / "pids"))
    return VllmStart(
        fake_python(tmp_path), tmp_path, tmp_path, "float32", 64, adapter={"r": 8}, gpus=0
    )


def left(folder):
    """Return the server's processes that live, once those have ended that are told to."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    found = pids
    for _ in range(18_000):  # half an hour, on a busy machine
        found = [pid for pid in pids if lives(pid)]
        if not found:
            break
        time.sleep(0.1)
    return found


def lives(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_server_answers_and_ends_with_the_block(start, tmp_path):
    with running(VllmServer, start) as server:
        assert server.version == "9.9"
        server.load_adapter("adapter", tmp_path)
        assert server.text_ids("abc") == [3]
        assert server.log_probabilities([4, 5, 6], [1, 2], model=BASE) == [fake_vllm.LOG_P] * 2
        assert server.answer([4], model=BASE, most=4, stop_ids=[2]) == [7, 2]
    assert left(tmp_path) == []


def test_what_it_refuses_is_told_in_its_words(start, tmp_path):
    with (
        pytest.raises(UserError, match=r"rank 999 is greater than max_lora_rank 8\. Set export\.m"),
        running(VllmServer, start) as server,
    ):
        server.load_adapter("adapter", tmp_path / "refused")
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fails", r"(?s)ended before it was ready.*ValueError: no such model type"),
        ("killed", r"(?s)ended before it was ready: it was killed, most likely for want of memory"),
        ("never", r"(?s)was not ready, and said nothing for 20 s.*starting"),
        ("dies", r"(?s)want of memory.*OutOfMemoryError: no room"),
        ("silent", r"did not answer /v1/completions within 20 s"),
        ("cut", r"ended while it was asked /v1/completions"),
        ("no JSON", r"answered /v1/completions by no JSON \('the engine is gone'\)"),
    ],
)
def test_failure_is_one_message_and_leaves_no_process(start, tmp_path, monkeypatch, mode, message):
    monkeypatch.setenv("FAKE_VLLM", mode)
    quiet_s = 20.0 if mode in ("never", "silent") else 600.0
    with (
        pytest.raises(UserError, match=message),
        running(VllmServer, replace(start, quiet_s=quiet_s)) as server,
    ):
        server.log_probabilities([4, 5], [1], model=BASE)
    assert left(tmp_path) == []


def test_killed_while_it_starts_leaves_no_process(start, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "never")
    program = (
        "from pathlib import Path; from workflow.lib.evaluation.vllm_server import *\n"
        "from workflow.lib.evaluation.model_server import running\n"
        f"with running(VllmServer, VllmStart(Path({str(start.python)!r}), Path(), Path(), "
        "'float32', 64, None, 0)): pass"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=os.environ.copy())
    while not (tmp_path / "pids").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left(tmp_path) == []


def test_file_that_llama_cpp_cannot_read_is_told_in_its_words(tmp_path):
    pytest.importorskip("xllamacpp")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    start = LlamaCppStart(tmp_path / "x.gguf", None, 64, setting="export.gguf")
    with (
        pytest.raises(UserError, match=r"(?s)^export\.gguf: llama\.cpp ended before .*x\.gguf"),
        running(LlamaCppServer, start),
    ):
        pass


@pytest.mark.parametrize(("rank", "slots"), [(1, 8), (8, 8), (9, 16), (24, 32), (512, 512)])
def test_slots_of_a_rank_are_a_power_of_two(start, rank, slots):
    for adapter in ({"r": rank, "rank_pattern": {}}, {"r": 1, "rank_pattern": {"q_proj": rank}}):
        assert replace(start, adapter=adapter).max_lora_rank == slots


def test_files_of_the_server_are_in_its_folder_which_is_removed(start, tmp_path):
    with running(VllmServer, start):
        (left_behind,) = map(Path, (tmp_path / "temporary").read_text().split())
        assert left_behind.parent.name.startswith("served-")
        assert left_behind.exists()
    assert not left_behind.parent.exists()


def test_adapter_on_experts_is_announced_with_the_option_and_the_request(start, tmp_path):
    adapter = {"r": 8, "target_parameters": ["mlp.experts.down_proj"]}
    start = replace(start, adapter=adapter)
    assert "--enable-mixed-moe-lora-format" in start.command(tmp_path)
    with running(VllmServer, start) as server:
        server.load_adapter("adapter", tmp_path, adapter)
        with pytest.raises(UserError, match="contains fused 3D MoE weights"):
            server.load_adapter("adapter", tmp_path)


def test_server_on_the_cpu_runs_eagerly_and_on_gpus_over_all(start, tmp_path):
    assert "--enforce-eager" in start.command(tmp_path)
    command = replace(start, gpus=2, adapter=None).command(tmp_path)
    assert command[command.index("--tensor-parallel-size") + 1] == "2"
    assert not {"--enforce-eager", "--enable-lora"} & {*command}
