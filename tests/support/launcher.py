"""A stage that starts the workers of `launch_worker`, alone or on one of two nodes: `python -m
tests.support.launcher PROCESSES <behaviour> <folder>`."""

import argparse
import os
from pathlib import Path

from workflow.lib.system.environment import find_node
from workflow.lib.training.launch import Workers, launch_workers
from workflow.scripts.command import command_parser, run


def main(args: argparse.Namespace) -> None:
    arguments = [args.behaviour, str(args.folder)]
    arguments += ["--log", str(args.log)] if args.log else []
    place = find_node(args.nodes, os.environ)
    launch_workers(Workers("tests.support.launch_worker", arguments, args.processes, node=place))


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("processes", type=int)
    parser.add_argument("behaviour")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=1)
    run(main, parser, locks_itself=True)
