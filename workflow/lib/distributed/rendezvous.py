"""Where the workers of one machine meet: a store on the loopback interface.

torchrun's own listens on every interface, so anybody could join a run or read its keys; gloo and
NCCL use loopback too. A run over several machines needs torchrun's own."""

import os
import socket

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import LOOPBACK as ADDRESS
from workflow.lib.system.hardware import check_processes_can_work, loopback_lack

LOOPBACK = "loopback"  # name of this backend in torchrun's registry
# Each library's variable for the interface that it listens on.
INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous of the one agent on this machine, for torchrun's registry."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return LOOPBACK

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers use the agent's store instead of opening one themselves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and this agent's place: the first of one."""
        if self._store is None:
            self._store = loopback_store()
        address = RendezvousStoreInfo(master_addr=ADDRESS, master_port=self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, address)

    def is_closed(self) -> bool:
        """Tell that it may always be used again."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other agent to tell."""

    def num_nodes_waiting(self) -> int:
        """Return the agents that want to join: there are no others."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Tell that nothing is left open: the store ends with this process."""
        return True


def loopback_store() -> TCPStore:
    """Return a store on a free port of the loopback interface; raises `UserError` without one."""
    if (lack := loopback_lack()) is not None:
        raise UserError(f"{lack}.")
    listening = socket.create_server((ADDRESS, 0))
    port = listening.getsockname()[1]
    # the store takes the descriptor over and closes it
    return TCPStore(
        ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def use_loopback() -> None:
    """Make the backend `loopback` known to torchrun, and let gloo and NCCL listen there, unless the
    user chose. Raises `UserError` where processes of this machine cannot work together."""
    check_processes_can_work()
    rendezvous_handler_registry.register(LOOPBACK, _create)
    for name, interface in INTERFACE.items():
        os.environ.setdefault(name, interface)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
