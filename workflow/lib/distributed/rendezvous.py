"""Where the workers of one machine meet: a store on the loopback interface.

torchrun's own listens on every interface, so anybody could join a run or read its keys; gloo and
NCCL use loopback too. A run over several machines needs torchrun's own."""

import os
import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from workflow.lib.system.errors import UserError
from workflow.lib.system.hardware import LOOPBACK as ADDRESS
from workflow.lib.system.hardware import check_processes_can_work, loopback_lack

JOIN_S = 600  # of a store that is there already, which nothing waits for
LOOPBACK = "loopback"  # name of this backend in torchrun's registry
# Each library's variable for the interface that it listens on.
INTERFACE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class LoopbackRendezvous(StaticTCPRendezvous):
    """A rendezvous of the one agent on this machine, for torchrun's registry."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        store = loopback_store()
        super().__init__(ADDRESS, store.port, 0, 1, parameters.run_id, JOIN_S)
        self._store = store

    def get_backend(self) -> str:
        return LOOPBACK


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
    rendezvous_handler_registry.register(LOOPBACK, LoopbackRendezvous)
    for name, interface in INTERFACE.items():
        os.environ.setdefault(name, interface)
