"""Files and folders of one process at a time, by locks that the kernel frees, however their holder
ends.

A lock file holds its holder's process id. A holder that ends in order removes the file, so a killed
one can be named later. A temporary folder is removed by its process, or, if that was killed, by the
next one that makes such a folder."""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from workflow.lib.system.errors import UserError

logger = logging.getLogger("workflow")

POLL_S = 0.5
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


@contextmanager
def exclusive(path: Path, *, doing: str, wait_s: float = 0.0) -> Iterator[str | None]:
    """Hold the lock file `path`; yield the process id of its last holder if that was killed: only
    then, or while held, the file exists. doing: for the message (`training this run`). Raises
    `UserError` if another holds it beyond `wait_s` seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, doing=doing, deadline=time.monotonic() + wait_s) as lock:
        lock.seek(0)
        killed = lock.read().strip() or None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield killed
        finally:
            # It is still held: a process that has opened it already finds out in `_locked`.
            path.unlink(missing_ok=True)


def _locked(path: Path, *, doing: str, deadline: float) -> TextIO:
    """Return the locked file at `path`; retry if its holder has removed it meanwhile."""
    while True:
        lock = path.open("a+")
        try:
            _acquire(lock, path, doing=doing, deadline=deadline)
            if _lies_at(path, lock):
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()


def _lies_at(path: Path, lock: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _acquire(lock: TextIO, path: Path, *, doing: str, deadline: float) -> None:
    is_announced = False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            refuse_without_locks(error, path.parent)
            if not isinstance(error, BlockingIOError):
                raise
            if time.monotonic() >= deadline:
                raise UserError(
                    f"{path.parent} is in use: process {_holder(lock)} is {doing}. Wait for it, or "
                    f"stop it (kill {_holder(lock)}), and repeat the command; it continues from "
                    "what is finished."
                ) from None
            if not is_announced:
                left_s = deadline - time.monotonic()
                message = "process %s is still %s; waiting up to %.0f s"
                logger.info(message, _holder(lock), doing, left_s)
            is_announced = True
            time.sleep(POLL_S)


def refuse_without_locks(error: OSError, folder: Path) -> None:
    """Raise `UserError` if the error is of a file system without locks."""
    if error.errno in NO_LOCKS:
        raise UserError(
            f"{folder}: its file system has no locks ({error.strerror}), and two commands must not "
            "write there at once. Mount it with locks (NFS: lockd, or version 4; Lustre: -o "
            "flock), or put this folder on another file system, by a link."
        ) from None


def _holder(lock: TextIO) -> str:
    lock.seek(0)
    return lock.read().strip() or "unknown"


@contextmanager
def temporary_folder(prefix: str, *, parent: str | None = None) -> Iterator[Path]:
    """Make a folder for the block, after removing those of dead processes with this prefix.
    parent: the system's temporary folder unless another is named."""
    root = Path(parent or tempfile.gettempdir())
    for path in root.glob(f"{prefix}*"):
        with suppress(OSError):  # it is in use, or another user's
            descriptor = _lock_folder(path, wait=False)
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)
    folder, descriptor = _make_folder(prefix, root)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _make_folder(prefix: str, root: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor that locks it; another one if some process took it for
    an abandoned one before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        with suppress(FileNotFoundError):
            descriptor = _lock_folder(folder, wait=True)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _lock_folder(folder: Path, *, wait: bool) -> int:
    """Return the descriptor that locks a folder of this user. Raises `OSError` if the lock is held,
    unless `wait`. A file system without locks has no abandoned folders to remove."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if not (wait and error.errno in NO_LOCKS):
            os.close(descriptor)
            raise
    return descriptor
