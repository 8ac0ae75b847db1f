"""Run a function in several gloo processes of this machine, as torchrun would start them.

Without GPUs they are forked from one server process that has imported the packages and run nothing: an import
costs 5 s of processor time, a fork none. The driver of a GPU does not survive a fork, so there they are spawned.
"""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

TIMEOUT_S = 240
PRELOADED = ["workflow.lib.setup", "workflow.lib.training", "workflow.lib.summary"]


def run_distributed(
    function: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Call `function(*args)` in `world_size` fresh processes with torchrun's environment; return their results by rank.

    timeout_s: the longest that a process may take. An exception in a process fails the caller with that process's traceback.
    """
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(PRELOADED)
    queue = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        context.Process(target=_enter, args=(rank, world_size, port, queue, function, args))
        for rank in range(world_size)
    ]
    for worker in workers:
        worker.start()
    try:
        results = dict(queue.get(timeout=timeout_s) for _ in workers)
    finally:
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    for rank, (failed, value) in results.items():
        assert not failed, f"process {rank} of {world_size} failed:\n{value}"
    return [pickle.loads(results[rank][1]) for rank in range(world_size)]


def _enter(
    rank: int, world_size: int, port: int, queue: Any, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        # pickled here: tensors sent as such would live in this process's shared memory
        queue.put((rank, (False, pickle.dumps(function(*args)))))
    except Exception:
        queue.put((rank, (True, traceback.format_exc())))
