"""A worker that opens a run's process group and writes down who listens where: `python -m
tests.support.rendezvous_worker FOLDER LAUNCHER`, the launcher by its process id."""

import json
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from workflow.lib.distributed.world import process_group

if __name__ == "__main__":
    with process_group("cpu", timeout_s=1800) as world:
        dist.all_reduce(torch.ones(3))
        dist.barrier(group=world.io_group)
        processes = [psutil.Process(), psutil.Process(int(sys.argv[2]))]
        addresses = [
            connection.laddr.ip
            for process in processes
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        (Path(sys.argv[1]) / str(world.rank)).write_text(json.dumps(addresses))
        dist.barrier()
