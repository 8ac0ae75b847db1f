"""One process at a time: a lock file that the kernel frees, whatever kills its holder, so nobody has to remove it."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from workflow.lib.errors import UserError

logger = logging.getLogger("workflow")

POLL_S = 0.5


@contextmanager
def exclusive(path: Path, *, doing: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file `path`, made if there is none; it stays there, free, with the last holder's process id.

    doing: what the holder does, for the message (`training this run`). wait_s: seconds to wait for another process,
    which may be about to end. Raises `UserError` that names it if it holds the lock longer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        if not _acquired(lock, doing=doing, wait_s=wait_s):
            raise UserError(
                f"{path.parent} is in use: process {_holder(lock)} is {doing}. Wait for it, or stop it (kill "
                f"{_holder(lock)}), and repeat the command; it continues from what is finished."
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _acquired(lock: TextIO, *, doing: str, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            if not told:
                message = "process %s is still %s; waiting up to %.0f s"
                logger.info(message, _holder(lock), doing, wait_s)
            told = True
            time.sleep(POLL_S)
        else:
            return True


def _holder(lock: TextIO) -> str:
    lock.seek(0)
    return lock.read().strip() or "unknown"
