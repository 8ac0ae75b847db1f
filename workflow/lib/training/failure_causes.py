"""From an exception or an exit status to its cause in a user's words, and what to change.

A worker translates its own exceptions (`explained`). The launcher chooses among the failures of all
processes: a lost peer is a consequence, even if it came first."""

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workflow.lib.artifacts.preflight_record import Forecast
from workflow.lib.data.tokens.token_store import TokenStore
from workflow.lib.planning.preflight.table import render
from workflow.lib.system.errors import PeerLostError, UserError
from workflow.lib.system.files import unwritable
from workflow.lib.system.units import GIB

# The wording of torch, and of NCCL below it, for GPUs; of allocators, and of a thread's start, for
# the host.
NO_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|bad_alloc|can't start new thread"
    r"|Cuda failure (\d+ )?'out of memory'"
)
PEER_LOST = re.compile(
    r"Connection (closed|reset) by|Broken pipe|Socket Timeout|Timed out "
    r"waiting|gloo.*(closed|timed? ?out)"
    r"|remote process exit|NCCL communicator was aborted|Connection refused",
    re.IGNORECASE,
)
SHARED_MEMORY = re.compile(r"NCCL.*(/dev/shm|shared memory segment)", re.DOTALL)
# Parts of an error's text, and the message; the first match counts.
TROUBLES = {
    re.compile(
        r"driver on your system is too old|driver version is insufficient|forward compatibility "
        r"was attempted"
        r"|no kernel image is available|PTX was compiled with an unsupported toolchain",
        re.IGNORECASE,
    ): "this PyTorch does not fit the GPU or its driver ({cause}). Install a newer driver, or the "
    "PyTorch of an older CUDA (envs/), and repeat the command; it continues from what is finished.",
    re.compile(
        r"CUDA error|CUDA driver error|unhandled cuda error|GPU is lost|Xid|ECC error|device-side "
        r"assert"
        r"|no CUDA-capable device",
        re.IGNORECASE,
    ): "the GPU or its driver failed ({cause}). Look for Xid in `dmesg` and at `nvidia-smi`; reset "
    "or leave out the GPU (CUDA_VISIBLE_DEVICES), and repeat the command; it continues from the "
    "last checkpoint, also on fewer GPUs.",
    re.compile(
        r"NCCL error|nccl\w*Error"
    ): "NCCL, which connects the GPUs, failed ({cause}). With NCCL_DEBUG=WARN in the environment "
    "it says more; between machines, NCCL_SOCKET_IFNAME names the network to use, and all need the "
    "same versions. Mend that and repeat the command; it continues from the last checkpoint.",
}


@contextmanager
def explained(
    *, run: str, preflight: Forecast, measured_bytes: Callable[[], int]
) -> Iterator[None]:
    """Turn exceptions that a user can act on into `UserError` (or `PeerLostError`); pass on the
    rest. measured_bytes: this process's peak so far."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if _out_of_memory(error):
            message = out_of_memory(error, run=run, preflight=preflight, measured=measured_bytes())
            raise UserError(message) from None
        if SHARED_MEMORY.search(str(error)):
            raise UserError(shared_memory_full(error)) from None
        if (fault := unwritable(error)) is not None:
            raise UserError(fault) from None
        if PEER_LOST.search(str(error)):
            raise PeerLostError(_first_line(error)) from error
        for pattern, message in TROUBLES.items():
            if pattern.search(str(error)):
                raise UserError(message.format(cause=_ends(error))) from error
        raise


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _ends(error: BaseException) -> str:
    """Return the first line, and the last, which is NCCL's cause."""
    lines = str(error).strip().splitlines()
    return " ... ".join(dict.fromkeys([lines[0], lines[-1].strip()]))


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and bool(NO_MEMORY.search(str(error)))


def out_of_memory(error: BaseException, *, run: str, preflight: Forecast, measured: int) -> str:
    """Return predicted and measured peak, preflight's smaller micro-batch, and its table."""
    plan = preflight.plan
    where = "GPU" if plan.device == "cuda" else "host"
    sizes = [(tried.plan(plan).micro_batch_size, tried) for tried in preflight.candidates]
    smaller = [(size, tried) for size, tried in sizes if size < plan.micro_batch_size]
    change = "Raise hardware.memory_margin_gib, use more processes, or shorten data.seq_len"
    if smaller:
        size, tried = max(smaller, key=lambda smaller_plan: smaller_plan[0])
        change = (
            f"Set train.micro_batch_size = {size} "
            f"(predicted peak {tried.peak_bytes / GIB:.2f} GiB); the result stays the same"
        )
    return (
        f"out of {where} memory: preflight predicted a peak of "
        f"{preflight.peak_bytes / GIB:.2f} GiB of "
        f"{preflight.capacity_bytes / GIB:.2f} GiB, {measured / GIB:.2f} GiB had been in use "
        f"before the request that failed ({_first_line(error)}). Is another program using "
        f"this memory? {change}, and repeat the command; it continues from the last checkpoint.\n"
        f"{render(preflight, run=run)}"
    )


def shared_memory_full(error: BaseException) -> str:
    """Return the message for NCCL in a container with 64 MB of shared memory."""
    return (
        f"the shared memory of this machine, /dev/shm, is full ({_ends(error)}). Start the "
        "container with more of it (docker run --shm-size=8g, or --ipc=host), and repeat the "
        "command; it continues from the last checkpoint."
    )


SIGNAL_CAUSES = {
    signal.SIGBUS: "a file that it reads by memory map was cut, or its disk failed",
    signal.SIGSEGV: "a defect in compiled code, or damaged memory",
    signal.SIGILL: "an instruction that this processor does not have",
}


def killed(number: int, *, out_of_memory_kills: int, damaged: list[str]) -> str:
    """Return why a process died of a signal. out_of_memory_kills: processes that the kernel has
    since killed for memory on this machine. damaged: faults since found in the inputs."""
    name = signal.Signals(number).name
    if number == signal.SIGKILL and out_of_memory_kills > 0:
        return (
            f"killed by {name}: the machine ran out of host memory, and the kernel ended it. Stop "
            "other programs, lower hardware.cpu_processes or train.micro_batch_size, or add memory"
        )
    cause = SIGNAL_CAUSES.get(signal.Signals(number), "")
    parts = [f"killed by {name}", *([cause] if cause else []), *damaged]
    return ": ".join(parts[:2]) + "".join(f". {part}" for part in parts[2:])


def memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return the number of processes that the kernel has killed for memory since the start."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def damaged_tokens(folder: Path) -> list[str]:
    """Return the fault of a tokens folder now, as a list of none or one."""
    try:
        TokenStore.open(folder)
    except UserError as error:
        return [str(error)]
    return []


def first_cause(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Return rank and `ProcessFailure` of the process that failed by itself, or None."""
    return min(failures.items(), key=lambda item: (followed(item[1]), item[1].timestamp, item[0]))


def followed(failure: Any) -> bool:
    """Tell whether a process only lost its peer, or was stopped."""
    text = str(failure.message)
    lost = PeerLostError.__name__ in text or PEER_LOST.search(text) is not None
    return lost or failure.exitcode == -signal.SIGTERM
