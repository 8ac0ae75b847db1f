"""A run on one machine cannot be reached from another."""

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.preloaded_python import SETTLED, preloaded_python
from workflow.lib.training.launch import (
    INTERFACE,
    Workers,
    launch_workers,
    loopback_store,
    use_loopback,
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for name in ("OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", *INTERFACE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_launcher_and_workers_listen_on_the_loopback_interface_alone(tmp_path, monkeypatch):
    """Workers are forked from a process that has imported their packages and listens nowhere."""
    monkeypatch.setattr(sys, "executable", preloaded_python())
    monkeypatch.setenv("HF_HUB_OFFLINE", SETTLED["HF_HUB_OFFLINE"])
    arguments = [str(tmp_path), str(os.getpid())]
    launch_workers(Workers("tests.support.rendezvous_worker", arguments, processes=2))
    listening = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [set(addresses) for addresses in listening] == [{"127.0.0.1"}] * 2
    assert min(map(len, listening)) >= 2, "the launcher's store and the worker's gloo"


def test_store_can_be_reached_under_no_other_address():
    store = loopback_store()
    mine = [c for c in psutil.Process().net_connections("inet") if c.laddr.port == store.port]
    assert {c.laddr.ip for c in mine if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_stores_have_different_ports():
    one, other = loopback_store(), loopback_store()
    assert one.port != other.port


def test_interface_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    use_loopback()
    assert {name: os.environ[name] for name in INTERFACE} == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "eth1",
    }
