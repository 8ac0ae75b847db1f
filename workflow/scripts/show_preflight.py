"""Print the predictions of runs as tables: memory by term, plans, time."""

import argparse
from pathlib import Path

from workflow.lib.artifacts.preflight_record import Preflight
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.planning.preflight.table import render
from workflow.scripts.command import command_parser, logger, run


def main(args: argparse.Namespace) -> None:
    for name, path in zip(args.runs, args.predictions, strict=True):
        logger.info("%s", render(read_record(path, Preflight), run=name))


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("--runs", nargs="+", required=True, help="their names")
    parser.add_argument(
        "--predictions", type=Path, nargs="+", required=True, help="their preflight.json"
    )
    run(main, parser)
