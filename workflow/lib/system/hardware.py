"""The machine's visible GPUs, host memory and disks, by driver and kernel, without torch."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pynvml

from workflow.lib.system.errors import UserError

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
LEAST_FREE_BYTES = 2**20  # the rest of a stage's needs is preflight's to check


@dataclass(frozen=True)
class Gpu:
    """One GPU (or one MIG instance of it) as the NVIDIA driver reports it."""

    name: str
    total_bytes: int
    used_bytes: int  # memory of all programs on it now
    uuid: str
    bfloat16: bool = True
    """Whether it multiplies bfloat16 (capability 8.0 and more), as flash attention needs."""
    float8: bool = True  # whether it multiplies float8: compute capability 8.9 and more


def visible_gpus() -> list[Gpu]:
    """Return the GPUs of `CUDA_VISIBLE_DEVICES`, or all; none without an NVIDIA driver."""
    return _query_visible(_describe)


def drawn_j() -> float | None:
    """Return the joules of the visible GPUs since their driver was loaded; None without GPUs, or if
    one does not report it."""
    drawn = _query_visible(_drawn_mj)
    return sum(drawn) / 1000 if drawn and min(drawn) >= 0 else None


def _drawn_mj(handle: object) -> int:
    with suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    return -1


def _query_visible(query: Callable[[object], T]) -> list[T]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        by_id = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in handles}
        by_id |= {str(index): handle for index, handle in enumerate(handles)}
        by_id |= {pynvml.nvmlDeviceGetUUID(part): part for part in _mig_instances(handles)}
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if chosen is not None:
            handles = _until_unknown(chosen.split(","), by_id)
        return [query(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def _mig_instances(handles: list[object]) -> Iterator[object]:
    """Yield the instances of the GPUs that are split by MIG."""
    for handle in handles:
        try:
            slots = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except pynvml.NVMLError:  # a GPU that cannot be split
            continue
        for slot in range(slots):
            with suppress(pynvml.NVMLError):  # an empty slot
                yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)


def _until_unknown(names: list[str], by_id: dict[str, object]) -> list[object]:
    """CUDA ignores every device from the first unknown name on."""
    chosen: list[object] = []
    for name in map(str.strip, names):
        # a GPU's UUID may be cut off
        is_begun = name.startswith("GPU-")
        match = [h for k, h in by_id.items() if k == name or (is_begun and k.startswith(name))]
        if not match:
            break
        chosen.append(match[0])
    return chosen


def _describe(handle: object) -> Gpu:
    name = pynvml.nvmlDeviceGetName(handle)
    info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return Gpu(
        name=str(name),
        total_bytes=int(info.total - info.reserved),  # as CUDA reports it
        used_bytes=int(info.used),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        bfloat16=_capability(handle) >= (8, 0),
        float8=_capability(handle) >= (8, 9),
    )


def _capability(handle: object) -> tuple[int, int]:
    """Return the compute capability; 9.0 for a MIG instance, which only newer GPUs can be. Training
    reads the instance itself."""
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return 9, 0
    return int(major), int(minor)


def interchangeable(gpus: Sequence[Gpu], *, count: int) -> list[Gpu]:
    """Return the GPUs any of which a run of `count` may get: their memory is at least 99% of the
    count-th largest (cards of one kind differ by up to 1%)."""
    sizes = sorted((gpu.total_bytes for gpu in gpus), reverse=True)[:count]
    return [gpu for gpu in gpus if not sizes or gpu.total_bytes >= 0.99 * sizes[-1]]


def available_host_bytes() -> int:
    """Return the available host memory: of MemAvailable and the cgroup's rest."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether the CPU multiplies bfloat16 itself: AVX512-BF16, AMX (x86), BF16 (Arm)."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    pairs = (line.partition(":")[::2] for line in lines)
    flags = {
        flag
        for key, words in pairs
        if key.strip() in ("flags", "Features")
        for flag in words.split()
    }
    return not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def check_writable(folders: Sequence[Path]) -> None:
    """Check that files can be written in the folders, which need not exist yet. Raises `UserError`
    for one that may not be written, or whose disk is full."""
    for folder in folders:
        _check_way(folder)
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        disk = os.statvfs(nearest)
        if not os.access(nearest, os.W_OK | os.X_OK):
            why = (
                "its disk is read-only"
                if disk.f_flag & os.ST_RDONLY
                else "its owner and mode do not allow it"
            )
            raise UserError(
                f"{folder} cannot be written: {why}. Mend that, and repeat the command; all that "
                "is finished is kept."
            )
        if disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES or (disk.f_files and not disk.f_favail):
            raise UserError(
                f"{folder} cannot be written: its disk is full ({disk.f_bavail * disk.f_frsize:,} "
                f"bytes and {disk.f_favail:,} files are left). Free some space, and repeat the "
                "command; all that is finished is kept."
            )


def _check_way(folder: Path) -> None:
    for path in (folder, *folder.absolute().parents):
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"{folder} cannot be written: {path} is a link to {path.readlink()}, which is not "
                "there. Make that folder, or mend the link."
            )
        if path.exists() and not path.is_dir():
            raise UserError(
                f"{folder} cannot be written: {path} is no folder. Remove it, or run elsewhere."
            )


SHARED_MEMORY = Path("/dev/shm")


def shared_memory_fault(folder: Path = SHARED_MEMORY) -> str | None:
    """Return why processes of this machine cannot share memory, None if they can."""
    if not folder.is_dir():
        why = "is not there"
    elif not os.access(folder, os.W_OK | os.X_OK):
        read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
        why = "is mounted read-only" if read_only else "may not be written by this user"
    else:
        return None
    return (
        f"the shared memory of this machine, {folder}, {why}, and processes share data there. "
        f"Mount it (mount -t tmpfs -o rw tmpfs {folder}), or start the container with it "
        "(docker run --shm-size=8g), and repeat the command"
    )


def loopback_fault(seconds: float = 5.0) -> str | None:
    """Return why processes here cannot connect over IPv4's loopback, None if they can."""
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=seconds),
        ):
            return None
    except OSError as error:
        return (
            f"this machine has no loopback network: {LOOPBACK} cannot be reached "
            f"({error.strerror or error}), and the processes of a run meet there. Bring it up (ip "
            "link set lo up; ip address add 127.0.0.1/8 dev lo), or start the container with a "
            "network, and repeat the command"
        )


def check_processes_can_work() -> None:
    """Raise `UserError` without shared memory or a loopback network."""
    for fault in (shared_memory_fault(), loopback_fault()):
        if fault is not None:
            raise UserError(f"{fault}.")


def threads_of_job() -> int:
    """Return the number of threads for all processes of this job. Snakemake gives every job its
    threads as `OMP_NUM_THREADS`; without it, the number of usable cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # OpenMP takes a list
    return int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0))
