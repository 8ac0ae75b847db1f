"""A job for the tests of leases: `python -m tests.support.lease_holder LOCKS COUNT JOURNAL
[SECONDS]`, on eight made-up cards.

It leases, writes `+ <its process id> <cards>` to the journal, works for a while, and writes `-
...`."""

import os
import sys
import time
from pathlib import Path

from workflow.lib.system.gpu_leases import lease
from workflow.lib.system.hardware import Gpu

NUM_CARDS = 8


def cards(*, used_bytes: int = 0) -> list[Gpu]:
    """Return the cards of a host that is made up."""
    return [
        Gpu(name="Card", total_bytes=2**34, used_bytes=used_bytes, uuid=f"GPU-{number}")
        for number in range(NUM_CARDS)
    ]


if __name__ == "__main__":
    folder, count, journal = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    held = lease(count, gpus=cards, folder=folder)
    names = ",".join(gpu.uuid for gpu in held)
    # One write to a file opened for appending is one piece, whoever else writes.
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"+ {os.getpid()} {names}\n".encode())
    time.sleep(float(sys.argv[4]) if len(sys.argv) > 4 else 1.0)
    os.write(file, f"- {os.getpid()} {names}\n".encode())
