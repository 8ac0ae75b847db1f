"""A stage for the tests of the launcher, on the command line of all stages: `python -m
tests.support.launch_worker <behaviour> <folder>`."""

import argparse
import atexit
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed

from tests.support.plans import make_forecast
from workflow.lib.distributed.heartbeat import Pulse
from workflow.lib.distributed.world import die_with_launcher, process_group
from workflow.lib.system.errors import BatchMemoryError
from workflow.lib.training.failure_causes import explained
from workflow.scripts.command import command_parser, run

LONG_S = 3600  # nobody waits so long: whoever sleeps or waits here is ended by the launcher


def allocate_too_much(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
    torch.empty(2**40)


def read_cut_file(folder: Path) -> None:
    path = folder / "tokens.npy"
    path.write_bytes(bytes(2**20))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        os.truncate(path, 0)
        print(mapped[-1])


def raising(error: Exception) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        raise error

    return act


class ToldToEndError(RuntimeError):
    """Its message is asked for when torchrun's file is written: the signal of the launcher comes at
    that moment."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "a message that is whole"


def fail(action: Callable[[Path], None], folder: Path) -> None:
    with explained(run="demo", preflight=make_forecast(), measured_bytes=lambda: 3 * 2**30):
        action(folder)


IN_ONE: dict[str, Callable[[Path], None]] = {
    "leave 1": lambda _: os._exit(3),  # as a library may do
    "kill 1": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "fail with batch": partial(fail, raising(BatchMemoryError(6))),
    "fail with memory": partial(fail, allocate_too_much),
    "fail with data": partial(fail, read_cut_file),
    "fail in 1, told to end while it says why": raising(ToldToEndError()),
}
"""What process 1 does while the other waits."""


def stop_in(phase: str, rank: int, base: Path) -> None:
    """Load a model and measure its held-out loss, until process 1 is stopped in the middle of one
    of them."""
    from tests.support.built_models import built_model
    from tests.support.finished import PLAN
    from tests.support.models import random_store
    from workflow.lib.settings.config import RunConfig
    from workflow.lib.training.best_adapter import HeldOut

    def stop() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with (
        Pulse(rank=rank, start_s=600, step_s=600, quiet_s=8) as pulse,
        process_group("cpu", timeout_s=LONG_S, moved=pulse.moved) as world,
    ):
        stopping = replace(world, moved=stop)
        pulse.phase("loading the model", least_s=600)
        loading = stopping if phase == "loading" else world
        model = built_model(base, RunConfig(), PLAN, loading)
        pulse.phase("held-out loss", least_s=600)
        heldout = HeldOut(
            random_store(rows=4, seq_len=17),
            every=1,
            num_steps=1,
            at_most=None,
            seed=0,
            micro_batch_size=1,
        )
        heldout.losses(model.training, world=stopping)


def oversleep() -> None:
    time.sleep(LONG_S)


NCCL = "over NCCL: "  # before a behaviour whose processes are to meet on GPUs

# What process 1 does in place of the last of the steps that all take together.
MISSED = {
    "stop 1": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep in 1": oversleep,
    "die in 1": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def miss_a_step(rank: int, action: Callable[[], None], *, device: str) -> None:
    with (
        Pulse(rank=rank, start_s=600, step_s=8) as pulse,
        process_group(device, timeout_s=LONG_S) as world,
    ):
        for step in range(1, 5):
            pulse.step(step)
            if step == 4 and rank == 1:
                action()
            torch.distributed.all_reduce(torch.ones(3, device=world.device))
            time.sleep(0.2)


def fail_beside_a_collective(rank: int, folder: Path, *, device: str) -> None:
    """Process 1 fails where the other waits for it, and all that tidies up waits too: NCCL's
    groups, and Python's exit."""
    torch.distributed.destroy_process_group = oversleep
    atexit.register(oversleep)
    with process_group(device, timeout_s=LONG_S) as world:
        if rank == 1:
            fail(raising(KeyError("a defect")), folder)
        torch.distributed.all_reduce(torch.ones(3, device=world.device))
        if device == "cuda":
            torch.cuda.synchronize()  # the host waits for the other process here


def tell_process_id(rank: int, folder: Path) -> None:
    die_with_launcher()
    (folder / f"{rank}.part").write_text(str(os.getpid()))
    (folder / f"{rank}.part").rename(folder / str(rank))
    time.sleep(LONG_S)


def note(rank: int, folder: Path) -> None:
    keys = ("WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    (folder / str(rank)).write_text(" ".join(os.environ[key] for key in keys))


def main(args: argparse.Namespace) -> None:
    folder, rank = args.folder, int(os.environ["RANK"])
    behaviour = args.behaviour.removeprefix(NCCL)
    device = "cpu" if behaviour == args.behaviour else "cuda"
    if behaviour in IN_ONE:  # the other waits
        if rank == 1:
            IN_ONE[behaviour](folder)
        time.sleep(LONG_S)
    elif behaviour == "note":
        note(rank, folder)
    elif behaviour == "stopped":
        sys.exit(os.EX_TEMPFAIL)
    elif behaviour == "wait":
        tell_process_id(rank, folder)
    elif behaviour == "lose a peer in 0, kill 1":  # the survivor is the first to say anything
        told = folder / "told"
        if rank == 1:
            while not told.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        told.touch()
        peer = "Connection closed by peer [127.0.0.1]:23456"
        fail(raising(RuntimeError(peer)), folder)
    elif behaviour == "fail in 1 beside a collective":
        fail_beside_a_collective(rank, folder, device=device)
    elif behaviour.startswith("stop in "):
        stop_in(behaviour.removeprefix("stop in "), rank, folder)
    else:
        fail(lambda _: miss_a_step(rank, MISSED[behaviour], device=device), folder)


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("behaviour")
    parser.add_argument("folder", type=Path)
    run(main, parser, locks_itself=True)
