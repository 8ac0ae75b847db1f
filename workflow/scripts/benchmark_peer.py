"""A worker of the benchmark: one case by a peer, TRL or unsloth. `benchmark_run` starts it."""

import argparse
import os
from importlib import import_module

from workflow.lib.distributed.world import die_with_launcher
from workflow.lib.system.checksums import read_artifact
from workflow.scripts.command import command_parser, run


def main(args: argparse.Namespace) -> None:
    die_with_launcher()
    (document,) = read_artifact(args.job).values()
    os.environ |= {  # read when unsloth is imported: it writes code, and would ask the network
        "UNSLOTH_COMPILE_LOCATION": str(args.output.resolve() / "unsloth"),
        "UNSLOTH_DISABLE_STATISTICS": "1",
    }
    # Its packages are optional, and unsloth must be imported before those that it patches.
    peer = import_module(f"workflow.benchmark.peer_{document['peer']['software']}")
    peer.measure(args.job, args.output)


if __name__ == "__main__":
    run(main, command_parser(__doc__, needs="job output"))
