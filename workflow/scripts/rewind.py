"""Go back to an earlier checkpoint of a run: the next start of its training resumes there.

Later files are set aside, not removed. Nothing is trained."""

import argparse
from pathlib import Path

from workflow.lib.system.locks import exclusive
from workflow.lib.training.chosen_checkpoint import go_back
from workflow.scripts.command import run, stage_parser


def main(args: argparse.Namespace) -> None:
    with exclusive(args.checkpoints / ".lock", doing="training this run"):
        go_back(args.checkpoints, args.step, results=args.results)


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="checkpoints step", config_required=False)
    parser.add_argument(
        "--results", type=Path, required=True, help="what the training left at its end"
    )
    run(main, parser)
