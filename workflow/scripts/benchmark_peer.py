"""A worker of the benchmark: one case by a peer, TRL. `benchmark_run` starts it."""

import argparse

from workflow.lib.distributed.world import die_with_launcher
from workflow.scripts.command import command_parser, run


def main(args: argparse.Namespace) -> None:
    die_with_launcher()
    from workflow.benchmark.peer_trl import measure  # its packages are optional: envs/peers.txt

    measure(args.job, args.output)


if __name__ == "__main__":
    run(main, command_parser(__doc__, needs="job output"))
