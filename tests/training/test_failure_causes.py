"""From what happened to a cause in a user's words; the launcher's choice among several failures."""

import errno
import signal
from dataclasses import dataclass

import pytest
import torch

from tests.support.finished import save_tokens
from tests.support.plans import make_forecast
from workflow.lib.system.errors import PeerLostError, UserError
from workflow.lib.training.failure_causes import (
    damaged_tokens,
    explained,
    first_cause,
    killed,
    memory_kills,
)

# What was raised, as torch, safetensors and the system word it, and the beginning of what the user
# reads.
EXPLAINED = {
    "GPU memory": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of"),
    "host memory": (
        RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 bytes"),
        "out of host memory",
    ),
    "full disk": (
        OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"),
        "the disk is full (metrics.jsonl)",
    ),
    "full disk under safetensors": (
        RuntimeError("I/O error: No space left on device (os error 28)"),
        "the disk is full",
    ),
    "read-only disk": (OSError(errno.EROFS, "Read-only file system"), "the disk is read-only"),
    "quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up"),
    "lost GPU": (
        RuntimeError("CUDA error: device-side assert triggered"),
        "the GPU or its driver failed",
    ),
    "lost GPU under NCCL": (
        RuntimeError("NCCL error: unhandled cuda error (run with NCCL_DEBUG)"),
        "the GPU or its driver failed",
    ),
    "GPU memory under NCCL": (
        RuntimeError(
            "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
        ),
        "out of",
    ),
    "old driver": (
        RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."),
        "this PyTorch does not fit the GPU or its driver (The NVIDIA",
    ),
    "other GPU": (
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        "this PyTorch does not fit",
    ),
    "NCCL": (
        RuntimeError(
            "NCCL error in: NCCLUtils.cpp:77, unhandled system error\nLast error:\nsocket: no "
            "route to host"
        ),
        "NCCL, which connects the GPUs, failed (NCCL error in: NCCLUtils.cpp:77, unhandled system "
        "error ... socket: no route to host)",
    ),
    "shared memory of a container": (
        RuntimeError(
            "NCCL error in: NCCLUtils.cpp:77, unhandled system error\nLast error:\nError while "
            "creating shared memory segment /dev/shm/nccl-8x (size 9637888), error: No space left "
            "on device (28)"
        ),
        "the shared memory of this machine, /dev/shm, is full (NCCL error",
    ),
}


@pytest.mark.parametrize(("error", "beginning"), EXPLAINED.values(), ids=EXPLAINED)
def test_failure_of_the_machine_is_a_message_with_what_to_do(error, beginning):
    with (
        pytest.raises(UserError) as caught,
        explained(run="demo", preflight=make_forecast(), measured_bytes=lambda: 2**31),
    ):
        raise error
    assert str(caught.value).startswith(beginning)
    assert "repeat the command" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1234",
        "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.",
    ],
)
def test_lost_peer_is_no_cause(text):
    with (
        pytest.raises(PeerLostError),
        explained(run="demo", preflight=make_forecast(), measured_bytes=lambda: 0),
    ):
        raise RuntimeError(text)


@pytest.mark.parametrize("error", [KeyError("a defect"), UserError("the GPU failed (CUDA error)")])
def test_defect_and_message_for_the_user_stay_what_they_are(error):
    with (
        pytest.raises(type(error)) as caught,
        explained(run="demo", preflight=make_forecast(), measured_bytes=lambda: 0),
    ):
        raise error
    assert caught.value is error


@dataclass
class Failure:
    """The part of torchrun's `ProcessFailure` that counts."""

    exitcode: int
    timestamp: int
    message: object = "Signal"


def test_process_that_only_followed_is_not_the_cause():
    failures = {
        0: Failure(1, 100, {"message": "PeerLostError: lost another process: Connection closed"}),
        1: Failure(-signal.SIGTERM, 99),
        2: Failure(-signal.SIGKILL, 102),
        3: Failure(1, 103, {"message": "KeyError: 'later'"}),
    }
    assert first_cause(failures)[0] == 2


def test_kill_by_the_kernel_for_memory_is_told_from_any_other():
    assert "ran out of host memory" in killed(9, out_of_memory_kills=1, damaged=[])
    assert killed(9, out_of_memory_kills=0, damaged=[]) == "killed by SIGKILL"


def test_kills_for_memory_are_counted_by_the_kernel(tmp_path):
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\npswpin 1\n")
    assert memory_kills(tmp_path / "vmstat") == 3
    assert memory_kills(tmp_path / "none") == 0


def test_tokens_cut_while_training_are_named(tmp_path):
    save_tokens(tmp_path / "tokens")
    assert damaged_tokens(tmp_path / "tokens") == []
    path = tmp_path / "tokens" / "train.input_ids.npy"
    path.write_bytes(path.read_bytes()[:-9])
    (message,) = damaged_tokens(tmp_path / "tokens")
    assert "train.input_ids.npy" in message
    assert "train.input_ids.npy" in killed(signal.SIGBUS, out_of_memory_kills=0, damaged=[message])
