"""Run a function in several gloo processes of this machine, as torchrun would start them.

Without GPUs they are forked from one server process that has imported the packages and run nothing:
an import costs 5 s of processor time, a fork none. The driver of a GPU does not survive a fork, so
there they are spawned. The processes meet at a store of the caller's, which listens before they
start: no port is looked for and then used."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from workflow.lib.distributed.world import process_group
from workflow.lib.training.launch import ADDRESS, INTERFACE, loopback_store

# Ends what hangs, on however busy a machine; also the bound of the processes' collectives.
TIMEOUT_S = 1800.0
PRELOADED = [
    "workflow.lib.training.build",
    "workflow.lib.training.loop",
    "workflow.lib.training.run_record",
    "peft.tuners.lora.bnb",
    "pytest",
    "tests.support.finished",
]
POLL_S = 1.0
# For others to say what they know of a failure, which may be its cause or follow from it.
OTHERS_S = 5.0


def run_distributed(function: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    """Call `function(*args)` in `world_size` fresh processes with torchrun's environment; return
    their results by rank.

    An exception in a process fails the caller at once, with the tracebacks that there are by then:
    the others may wait for that process for as long as a collective may take."""
    context = fresh_processes()
    results = context.Queue()
    store = loopback_store()
    workers = [
        context.Process(target=_enter, args=(rank, world_size, store.port, results, function, args))
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    try:
        found = _collect(results, workers, deadline=time.monotonic() + TIMEOUT_S)
        failed = [
            f"process {rank} of {world_size}:\n{value}"
            for rank, (bad, value) in found.items()
            if bad
        ]
        assert not failed, "\n".join(failed)
        silent = {rank: worker.exitcode for rank, worker in enumerate(workers) if rank not in found}
        assert not silent, f"processes that gave no result, with their exit status: {silent}"
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return [pickle.loads(found[rank][1]) for rank in range(world_size)]


def run_in_group(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    device: str = "cpu",
    **options: int | None,
) -> list[Any]:
    """Call `function(world, *args)` in processes that have joined a group, as `run_distributed`
    does; options: as for `process_group`."""
    timed = {"timeout_s": TIMEOUT_S, **options}
    return run_distributed(_in_group, function, args, device, timed, world_size=world_size)


def _in_group(
    function: Callable[..., Any], args: tuple[Any, ...], device: str, options: dict[str, Any]
) -> Any:
    with process_group(device, **options) as world:
        return function(world, *args)


def fresh_processes() -> BaseContext:
    """Return what starts processes in which nothing has run."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _collect(
    results: Any, workers: list[BaseProcess], *, deadline: float
) -> dict[int, tuple[bool, Any]]:
    """Return what the processes gave: of all, or of some when one has failed, died or taken too
    long."""
    found = {}
    while len(found) < len(workers) and time.monotonic() < deadline:
        # read before the queue: what a process has sent by its end is in the queue then
        dead = any(
            not worker.is_alive() for rank, worker in enumerate(workers) if rank not in found
        )
        try:
            rank, result = results.get(timeout=POLL_S)
        except queue.Empty:
            if dead:
                break
            continue
        found[rank] = result
        if result[0]:
            deadline = min(deadline, time.monotonic() + OTHERS_S)
    return found


def _enter(
    rank: int, world_size: int, port: int, results: Any, function: Callable[..., Any], args: Any
) -> None:
    faulthandler.enable()  # a crash in a package's own code tells where, on standard error
    gc.freeze()  # a collection would copy all that is shared with the server
    torch.set_num_threads(1)
    os.environ |= INTERFACE | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        # pickled here: tensors sent as such would live in this process's shared memory
        results.put((rank, (False, pickle.dumps(function(*args)))))
    except Exception:
        results.put((rank, (True, traceback.format_exc())))
