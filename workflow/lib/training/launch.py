"""Start of a run's processes by torchrun's API, and the first one to fail.

Workers of one machine meet at a store on the loopback interface. torchrun's own listens on every
interface, so anybody could join a run or read its keys; gloo and NCCL use loopback too. A run over
several machines needs torchrun's own."""

import json
import logging
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from workflow.lib.distributed.heartbeat import BEAT_S, FOLDER_VARIABLE, JOIN_S, WAITING, Watch
from workflow.lib.system.environment import ALONE, LAUNCHER_VARIABLE, RunNode
from workflow.lib.system.errors import BatchMemoryError, PeerLostError, StoppedError, UserError
from workflow.lib.system.hardware import LOOPBACK as ADDRESS
from workflow.lib.system.hardware import check_processes_can_work, loopback_fault, threads_of_job
from workflow.lib.system.interrupts import SIGNALS, children_of
from workflow.lib.system.locks import temporary_folder
from workflow.lib.system.units import MIB
from workflow.lib.training.failure_causes import first_cause, followed, killed, memory_kills

STORE_JOIN_S = 600  # of a store that exists already, so nothing waits for it
LOOPBACK = "loopback"  # name of this backend in torchrun's registry
# Each library's variable for the interface that it listens on.
INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class LoopbackRendezvous(StaticTCPRendezvous):
    """A rendezvous of this machine's only agent, for torchrun's registry."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        store = loopback_store()
        super().__init__(ADDRESS, store.port, 0, 1, parameters.run_id, STORE_JOIN_S)
        self._store = store

    def get_backend(self) -> str:
        return LOOPBACK


def loopback_store() -> TCPStore:
    """Return a store on a free port of the loopback interface; raises `UserError` without one."""
    if (fault := loopback_fault()) is not None:
        raise UserError(f"{fault}.")
    listening = socket.create_server((ADDRESS, 0))
    port = listening.getsockname()[1]
    # the store takes over the descriptor and closes it
    return TCPStore(
        ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def use_loopback() -> None:
    """Register the backend `loopback` with torchrun, and let gloo and NCCL listen there, unless the
    user chose. Raises `UserError` if processes of this machine cannot communicate."""
    check_processes_can_work()
    rendezvous_handler_registry.register(LOOPBACK, LoopbackRendezvous)
    for name, interface in INTERFACE.items():
        os.environ.setdefault(name, interface)


STOPPED = "training was stopped by a signal; the same command continues from the last checkpoint"
TWICE_S = 5.0  # between two copies of one signal, on a busy machine
TOO_LARGE = f"{BatchMemoryError.__name__}: "  # before the size, as torchrun passes an exception on
ELSEWHERE = "another machine of the run says why, in the same log; if none does, one is gone."
REPEAT = "Repeat the command to continue from what is finished."

DEFAULTS = {  # unless the user has set them
    # Growing segments waste 2.5% where fixed ones waste 10%; `budget.ALLOCATOR_SLACK` assumes it.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Else NCCL registers the buffers of collectives in CUDA graphs, which fails with expandable
    # segments: Megatron-LM refuses the two together.
    "NCCL_GRAPH_REGISTER": "0",
    "TORCH_FR_BUFFER_SIZE": "200",  # collectives in the flight recorder
    # glibc keeps a step's freed memory for the next step, else the kernel clears the same pages
    # every step: 4 times the page faults, 3% of the demo's processor time. 32 MiB is glibc's bound.
    "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
    "MALLOC_TRIM_THRESHOLD_": str(256 * MIB),
}


@dataclass(frozen=True)
class Workers:
    """`python -m module arguments` in `processes` torchrun workers; node: this machine's share;
    grace_s: seconds to save after a signal; what: for the message."""

    module: str
    arguments: Sequence[str]
    processes: int
    node: RunNode = ALONE
    grace_s: float = 60.0
    deterministic: bool = False
    what: str = "training"

    @property
    def ranks(self) -> range:
        local = self.processes // self.node.nodes
        return range(self.node.index * local, (self.node.index + 1) * local)


def launch_workers(workers: Workers, *, inspect_inputs: Callable[[], list[str]] = list) -> None:
    """Run workers on every node; return when all have succeeded. inspect_inputs: returns faults of
    files if one was killed. Raises `UserError` with the first cause, `BatchMemoryError`,
    `PeerLostError` for another node's, `StoppedError` after a signal."""
    stop_on_signals()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # said below
    memory_kills_before = memory_kills()
    hung: list[str] = []
    try:
        _run_workers(workers, hung)
    except ChildFailedError as error:
        if any(f.exitcode == os.EX_TEMPFAIL for f in error.failures.values()):
            raise StoppedError(STOPPED) from None
        rank, failure = first_cause(error.failures)
        if hung:
            cause, elsewhere = hung[0], hung[0].startswith(WAITING)
        else:
            cause = _cause(failure, memory_kills_before, inspect_inputs)
            elsewhere = followed(failure)
        raise _explained(cause, workers, rank=rank, elsewhere=elsewhere) from None
    except SignalException:
        raise StoppedError(STOPPED) from None
    except json.JSONDecodeError:
        raise UserError(
            f"a process failed, and its message is cut: is {tempfile.gettempdir()} full? "
            f"The log may have it. {REPEAT}"
        ) from None


def _run_workers(workers: Workers, hung: list[str]) -> None:
    """Run this machine's workers under torchrun, watched; `hung` gets a message for a hung one."""
    inherited = worker_environment(
        len(workers.ranks), grace_s=workers.grace_s, deterministic=workers.deterministic
    )
    with temporary_folder("finetune-launch-") as folder, changed_environment(inherited):
        config = LaunchConfig(
            min_nodes=workers.node.nodes,
            max_nodes=workers.node.nodes,
            nproc_per_node=len(workers.ranks),
            max_restarts=0,
            monitor_interval=0.2,
            signals_to_handle="SIGQUIT",  # the others: `stop_on_signals`
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torchrun")),
            **_rendezvous(workers.node),
        )
        heartbeats = folder / "heartbeats"
        with watched(workers.ranks, size=workers.processes, folder=heartbeats, hung=hung):
            elastic_launch(config, sys.executable)("-m", workers.module, *workers.arguments)


def _explained(cause: str, workers: Workers, *, rank: int, elsewhere: bool) -> Exception:
    """Return the exception for the cause of process `rank`, the first to fail. elsewhere: it waited
    for another process, or lost it, so another machine may know the cause."""
    if elsewhere and workers.node.nodes > 1:
        return PeerLostError(f"{cause.rstrip()}\n({workers.what}: {ELSEWHERE} {REPEAT})")
    if cause.startswith(TOO_LARGE):
        return BatchMemoryError(int(cause.removeprefix(TOO_LARGE)))
    return UserError(
        f"{cause.rstrip()}\n({workers.what}: process {rank} of {workers.processes}, the first to "
        f"fail; the log says more. {REPEAT})"
    )


def stop_on_signals() -> None:
    """Make `interrupts.SIGNALS` end the workers by SIGTERM; an ignored one stays ignored.
    Terminal and Snakemake both send it to a launcher: within `TWICE_S` they are one request, as a
    second would cut short the workers' save."""
    last = -math.inf

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal last
        again = time.monotonic() - last < TWICE_S
        if not again:
            last = time.monotonic()
            raise SignalException(signal.Signals(number).name, sigval=signal.SIGTERM)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


def worker_environment(processes: int, *, grace_s: float, deterministic: bool) -> dict[str, str]:
    """Return the variables that this machine's workers inherit; processes: their number."""
    threads = str(max(1, threads_of_job() // processes))
    variables = {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}
    variables |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if deterministic:  # docs.nvidia.com/cuda/cublas, "Results reproducibility"
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # torch's variable; without it workers are killed 30 s after the signal
    return variables | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(grace_s))}


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def watched(ranks: range, *, size: int, folder: Path, hung: list[str]) -> Iterator[None]:
    """Within the block watch the heartbeats of this process's workers. They are `ranks`, of `size`
    in all, and write to `folder`, which is made. When one hangs, all are ended and `hung` gets the
    reason."""
    ended = threading.Event()
    folder.mkdir()
    variables = {FOLDER_VARIABLE: str(folder), LAUNCHER_VARIABLE: str(os.getpid())}
    with changed_environment(variables):
        watch = Watch(folder, ranks=ranks, size=size)
        watcher = threading.Thread(target=_watch, args=(watch, hung, ended), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _watch(watch: Watch, hung: list[str], ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        verdict = watch.look()
        if verdict is None:
            continue
        hung.append(verdict)
        for pid in children_of(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # a hung process ignores any other signal
        return


def _cause(
    failure: ProcessFailure, memory_kills_before: int, inspect_inputs: Callable[[], list[str]]
) -> str:
    """Return a worker's error message, or why there is none."""
    message: Any = failure.message  # torch writes a mapping where it declares a string
    if failure.exitcode < 0 and not isinstance(message, dict):  # else its watcher wrote why
        kills = memory_kills() - memory_kills_before
        return killed(-failure.exitcode, out_of_memory_kills=kills, damaged=inspect_inputs())
    if not isinstance(message, dict):
        return f"exit status {failure.exitcode}; its message stands above"
    return re.sub(
        r"^(UserError|PeerLostError: lost another process): ", "", str(message["message"])
    )


def _rendezvous(node: RunNode) -> dict[str, Any]:
    """Return the workers' rendezvous: on this machine, or at the first node."""
    if node.nodes == 1:
        use_loopback()
        return {"run_id": uuid.uuid4().hex, "rdzv_backend": LOOPBACK}
    return {
        "run_id": node.run_id,
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{node.address}:{node.port}",
        "rdzv_configs": {"rank": node.index, "timeout": int(JOIN_S)},
    }
