"""The machine as the workflow sees it: visible GPUs, processes, host memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.refusals import refusal
from tests.support.workflow_project import REPOSITORY
from workflow.lib.planning.machine import num_processes, requested_processes
from workflow.lib.settings.config import HardwareConfig
from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import (
    _until_unknown,
    available_host_bytes,
    check_writable,
    cpu_has_bfloat16,
    loopback_fault,
    shared_memory_fault,
    visible_gpus,
)

FLAGS = {
    "flags\t\t: fpu avx512f avx512_bf16 sse": True,
    "flags\t\t: fpu amx_bf16 amx_tile": True,
    "Features\t: fp asimd i8mm bf16 dgh": True,
    "flags\t\t: fpu avx512f avx512_vnni": False,
    "model name\t: A CPU with bf16 in its name": False,
    "": False,
}


@pytest.mark.parametrize(("line", "expected"), FLAGS.items())
def test_cpu_that_multiplies_bfloat16_is_known_by_its_flags(tmp_path, line, expected):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    assert cpu_has_bfloat16(tmp_path / "cpuinfo") is expected


needs_gpu = pytest.mark.skipif(not visible_gpus(), reason="no GPU is visible")

# What the driver reports on a machine with three GPUs: handles by index and by UUID.
GPUS = {
    "GPU-aaaa-1": "first",
    "GPU-aabb-2": "second",
    "GPU-cccc-3": "third",
    "0": "first",
    "1": "second",
    "2": "third",
}


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        ("0,1,2", ["first", "second", "third"]),
        ("2,0", ["third", "first"]),  # the order is kept
        (" 1 , 2", ["second", "third"]),
        ("GPU-cccc-3,GPU-aaaa-1", ["third", "first"]),
        ("GPU-c", ["third"]),  # a prefix will do
        ("GPU-aab,0", ["second", "first"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["first"]),  # all from the first unknown one on are ignored
        ("0,7,1", ["first"]),
        ("1,none", ["second"]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(variable, chosen):
    assert _until_unknown(variable.split(","), GPUS) == chosen


def test_empty_visible_devices_hide_every_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_auto_without_visible_gpus_trains_on_the_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert num_processes(HardwareConfig(gpus="auto", cpu_processes=3)) == ("cpu", 3)


def test_more_gpus_than_visible_says_how_many_there_are(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert refusal(num_processes, HardwareConfig(gpus=2)) == (
        "hardware.gpus = 2: this machine shows 0 GPU(s). Set it to that number or below, or to "
        "auto; 0 trains on the CPU. To plan for a cluster's GPUs, name them in hardware.gpu_model."
    )


@pytest.mark.gpu
@needs_gpu
def test_gpus_are_described_as_torch_describes_them():
    torch = pytest.importorskip("torch")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    assert [gpu.name for gpu in visible_gpus()] == names


def test_available_host_memory_is_part_of_the_machines():
    first = Path("/proc/meminfo").read_text().splitlines()[0]  # MemTotal:  123 kB
    assert 0 < available_host_bytes() <= int(first.split()[1]) * 1024


def test_a_run_for_gpus_can_be_planned_where_there_are_none():
    assert requested_processes(HardwareConfig(gpus=8)) == ("cuda", 8)
    assert requested_processes(HardwareConfig(gpus=0, cpu_processes=3)) == ("cpu", 3)


def test_link_that_leads_nowhere_is_no_place_for_results(tmp_path):
    (tmp_path / "results").symlink_to(tmp_path / "lost")
    with pytest.raises(UserError, match=r"results is a link to .*/lost, which is not there"):
        check_writable([tmp_path / "results" / "runs"])


def test_file_in_a_folder_s_place_is_named(tmp_path):
    (tmp_path / "results").touch()
    with pytest.raises(UserError, match=r"results is no folder"):
        check_writable([tmp_path / "results"])


def test_lack_of_shared_memory_is_told_with_what_to_do(tmp_path):
    assert shared_memory_fault(tmp_path) is None
    assert "shm, is not there" in str(shared_memory_fault(tmp_path / "shm"))


def test_machine_without_loopback_is_told_in_words():
    """In a network of its own, whose loopback is down until somebody brings it up."""
    assert loopback_fault() is None
    code = "from workflow.lib.system.hardware import loopback_fault; print(loopback_fault())"
    command = ["unshare", "--net", "--map-root-user", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        pytest.skip(f"a network of its own is not allowed here: {done.stderr.strip()}")
    assert done.stdout.startswith("this machine has no loopback network: 127.0.0.1 cannot be")


@pytest.mark.parametrize(("visible", "joules"), [("1,3", "6.0"), ("", "None")])
def test_energy_is_that_of_the_visible_gpus(visible, joules):
    """The driver's cards have drawn 1, 2, 3, ... joules."""
    driver = {
        "PYTHONPATH": str(REPOSITORY / "tests" / "fake_driver"),
        "CUDA_VISIBLE_DEVICES": visible,
    }
    code = "from workflow.lib.system.hardware import drawn_j; print(drawn_j())"
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | driver | {"CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == joules
