"""A worker for the tests of the launcher: `python -m tests.launch_worker <behaviour> <folder>`."""

import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.elastic.multiprocessing.errors import record

from tests.preflight_examples import SMALL_DOCUMENT
from workflow.lib.diagnosis import explained


def allocate_too_much() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
    torch.empty(2**40)


def write_too_much() -> None:
    """A limit stands in for a full disk: the same error class, by the same path."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        (folder / "checkpoint").write_bytes(bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read_cut_file() -> None:
    path = folder / "tokens.npy"
    path.write_bytes(bytes(2**20))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        os.truncate(path, 0)
        print(mapped[-1])


def lose_peer() -> None:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:23456")


def lose_gpu() -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


FAILURES = {
    "memory": allocate_too_much,
    "disk": write_too_much,
    "data": read_cut_file,
    "gpu": lose_gpu,
}


@record
def fail(action: Callable[[], None]) -> None:
    with explained(run="demo", preflight=SMALL_DOCUMENT, measured_bytes=lambda: 3 * 2**30):
        action()


behaviour, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])

if behaviour == "note":
    keys = ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    (folder / str(rank)).write_text(" ".join(os.environ[key] for key in keys))
elif behaviour == "raise in 1":
    if rank == 1:
        raise RuntimeError("a defect")
    time.sleep(60)
elif behaviour == "kill 1":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
elif behaviour == "stopped":
    sys.exit(os.EX_TEMPFAIL)
elif behaviour == "wait":
    from workflow.lib.parallel import die_with_parent

    die_with_parent()
    (folder / f"{rank}.part").write_text(str(os.getpid()))
    (folder / f"{rank}.part").rename(folder / str(rank))
    time.sleep(120)
elif behaviour == "lose a peer in 0, kill 1":  # the survivor is the first to say anything
    if rank == 1:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    fail(lose_peer)
elif behaviour.startswith("fail with "):
    if rank == 1:
        fail(FAILURES[behaviour.removeprefix("fail with ")])
    time.sleep(120)
elif behaviour in ("stop 1", "sleep in 1"):
    from workflow.lib.heartbeat import Pulse
    from workflow.lib.parallel import process_group

    with Pulse(rank=rank, start_s=600, step_s=14) as pulse, process_group("cpu", timeout_s=300):
        for step in range(1, 5):
            pulse.step(step)
            if step == 4 and rank == 1:
                if behaviour == "stop 1":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(200)
            torch.distributed.all_reduce(torch.ones(3))
            time.sleep(0.2)
