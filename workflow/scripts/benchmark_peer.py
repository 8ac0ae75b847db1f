"""A worker of the benchmark: one case by a peer, TRL. `benchmark_run` starts it."""

import argparse
from pathlib import Path

from workflow.lib.distributed.world import die_with_launcher
from workflow.scripts.command import run, stage_parser


def main(args: argparse.Namespace) -> None:
    die_with_launcher()
    from workflow.benchmark.peer_trl import measure  # its packages are optional: envs/peers.txt

    measure(args.job, args.output)


if __name__ == "__main__":
    parser = stage_parser(__doc__, config_required=False)
    parser.add_argument("--job", type=Path, required=True, help="file of the case")
    parser.add_argument("--output", type=Path, required=True, help="folder of the record")
    run(main, parser)
