"""What fails once for many tests, and ports that stay bound."""

import os
import socket
import threading
from pathlib import Path

import pytest

from tests.support import distributed
from tests.support.distributed import run_in_group
from tests.support.shared import made_once, reserved_ports


def test_what_could_not_be_made_is_not_tried_again(tmp_path):
    """By another process either: it finds what the first has left."""

    def fail(folder: Path) -> None:
        tried.append(folder)
        raise OSError("the cause")

    tried = []
    with pytest.raises(OSError, match="the cause"):
        made_once(tmp_path / "it", fail)
    with pytest.raises(pytest.fail.Exception, match=r"^it could not be made, as .*::test_what"):
        made_once(tmp_path / "it", fail)
    assert tried == [tmp_path / "it"]


def test_reserved_port_is_free_for_its_server_alone():
    with reserved_ports(2) as (port, other):
        assert port != other
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server:
            socket.create_connection(server.getsockname()).close()


def leave(world, status: int) -> None:
    """Process 1 ends without a word, as one that is killed; the other waits without end."""
    if world.rank == 1:
        os._exit(status)
    threading.Event().wait()


def fail_in_one(world) -> None:
    if world.rank == 1:
        raise KeyError("the cause")
    threading.Event().wait()


def test_process_without_a_result_is_named_while_the_others_wait():
    with pytest.raises(AssertionError, match=r"gave no result.*: \{0: None, 1: 7\}"):
        run_in_group(leave, 7, world_size=2)


def test_process_that_fails_is_told_while_the_others_wait(monkeypatch):
    monkeypatch.setattr(distributed, "OTHERS_S", 0.0)
    with pytest.raises(AssertionError, match=r"process 1 of 2:(.|\n)*KeyError: 'the cause'"):
        run_in_group(fail_in_one, world_size=2)
