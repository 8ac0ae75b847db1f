"""What the processes of a test session share: what one of them makes for all, and the ports of this
machine."""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from workflow.lib.system.locks import exclusive

WAIT_S = 3600.0  # for another process that makes it, on a busy machine


def current_test() -> str:
    """Return the id of the test that runs, or for which a fixture is set up."""
    return os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return `folder`, made by the first process of the session that asks for it. Never change what
    is there.

    The test for which it could not be made shows the cause. Every other that asks fails at once and
    names that test."""
    made, failed = (folder.with_name(f"{folder.name}.{end}") for end in ("made", "failed"))
    lock = folder.with_name(f"{folder.name}.lock")
    with exclusive(lock, doing=f"making {folder.name}", wait_s=WAIT_S):
        if failed.exists():
            pytest.fail(failed.read_text(), pytrace=False)
        if not made.exists():
            # written before: a process that is killed meanwhile says nothing afterwards
            failed.write_text(f"{folder.name} could not be made, as {current_test()} shows")
            make(folder)
            made.touch()
            failed.unlink()
    return folder


@contextmanager
def reserved_ports(count: int, among: Iterable[int] | None = None) -> Iterator[list[int]]:
    """Yield ports of this machine, of `among` if given, that nobody gets within the block but a
    server that is told them.

    They stay bound. The server has to set SO_REUSEADDR, as torch's and Slurm's do: then it may
    listen at a port to which others are bound with that option and where nobody listens
    (socket(7))."""
    candidates = iter(among) if among is not None else iter([0] * count)
    with ExitStack() as stack:
        ports = []
        while len(ports) < count:
            one = stack.enter_context(socket.socket())
            with suppress(OSError):  # in use
                one.bind(("", next(candidates)))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # once it is ours alone
                ports.append(one.getsockname()[1])
        yield ports
