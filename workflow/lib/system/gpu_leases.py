"""Leases of this host's GPUs: only the holder of a card's lock uses it, among this workflow's jobs.

Snakemake counts GPUs but assigns none. So a job locks a file per card, named by its UUID, in a
folder of all users; the kernel frees it with the process. A card with another program's memory is
not leased either. There is no queue."""

import contextlib
import fcntl
import os
import random
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import Gpu, interchangeable, visible_gpus
from workflow.lib.system.locks import refuse_without_locks

FOLDER = Path("/tmp/gpu-leases")  # not TMPDIR, which may differ between jobs of a host
POLL_S = 1.0
# A desktop and its browser hold about 1 GiB of a card; a process that computes, seldom less than 2.
IN_USE_BYTES = 2 * 2**30
ANY_MAY_ADD = stat.S_ISVTX | 0o777  # as /tmp: all users may add files, none may remove another's
ANY_MAY_READ = 0o644  # enough for flock


def lease(
    count: int,
    *,
    gpus: Callable[[], Sequence[Gpu]] = visible_gpus,
    folder: Path = FOLDER,
    waiting: Callable[[str], None] = lambda message: None,
) -> list[Gpu]:
    """Lock `count` of the GPUs that `gpus()` lists and return them; wait for free ones. The locks
    last as long as this process, and pass to its exec'ed program. `waiting` gets once the reason of
    a long wait. Raises `UserError` if there are fewer GPUs than `count`."""
    is_announced = False
    while count:
        listed = interchangeable(gpus(), count=count)
        if len(listed) < count:
            raise UserError(
                f"{count} GPU(s) are asked for, {len(listed)} are visible here "
                f"(CUDA_VISIBLE_DEVICES = {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). "
                "Lower hardware.gpus, or show more."
            )
        leased, why = _try_to_lock(listed, count=count, folder=folder)
        if leased:
            return leased
        if not is_announced:
            waiting(f"waiting for {count} of {len(listed)} GPU(s): {'; '.join(why)}")
            is_announced = True
        # Two jobs that wait in step would collide at the same cards for ever.
        time.sleep(POLL_S * random.uniform(0.5, 1.5))
    return []


def _try_to_lock(gpus: Sequence[Gpu], *, count: int, folder: Path) -> tuple[list[Gpu], list[str]]:
    """Lock `count` of `gpus`, or none; return those locked, and why others are not available."""
    held: list[tuple[Gpu, int]] = []
    why = []
    for gpu in gpus:
        if len(held) == count:
            break
        if gpu.used_bytes > IN_USE_BYTES:
            why.append(f"{gpu.uuid} has {gpu.used_bytes / 2**30:.1f} GiB in use by another program")
            continue
        descriptor = _lock(folder, gpu.uuid)
        if descriptor is None:
            why.append(f"{gpu.uuid} is leased to another job")
        else:
            held.append((gpu, descriptor))
    if len(held) == count:
        return [gpu for gpu, _ in held], why
    for _, descriptor in held:
        os.close(descriptor)
    return [], why


def _lock(folder: Path, uuid: str) -> int | None:
    """Return the locked descriptor of a card's file, which exec inherits; None if held."""
    descriptor = _open(folder, uuid)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        refuse_without_locks(error, folder)
        if not isinstance(error, BlockingIOError):
            raise
        return None
    os.set_inheritable(descriptor, True)
    return descriptor


def _open(folder: Path, name: str) -> int:
    """Open a lock file for reading, of any owner; make folder and file if needed. Another user may
    have put anything there: links are not followed, and pipes do not block."""
    try:
        with _without_umask(), contextlib.suppress(FileExistsError):
            folder.mkdir(mode=ANY_MAY_ADD)
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _share(directory, ANY_MAY_ADD)
            # Without O_CREAT if it exists: the kernel refuses that for another user's file.
            with _without_umask(), contextlib.suppress(FileExistsError):
                os.close(os.open(name, os.O_CREAT | os.O_EXCL, ANY_MAY_READ, dir_fd=directory))
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        finally:
            os.close(directory)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"{folder / name} is no regular file")
        _share(file, ANY_MAY_READ)
    except OSError as error:
        raise UserError(
            f"{folder}: the folder of GPU leases cannot be used ({error}). Have its owner or root "
            "remove it, or let all users write to it."
        ) from None
    return file


@contextlib.contextmanager
def _without_umask() -> Iterator[None]:
    """Create with the full mode at once, regardless of the user's umask."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def _share(descriptor: int, mode: int) -> None:
    """Give an own folder or file the mode with which all users can lease."""
    state = os.fstat(descriptor)
    if state.st_uid == os.geteuid() and stat.S_IMODE(state.st_mode) != mode:
        os.fchmod(descriptor, mode)
