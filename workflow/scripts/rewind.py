"""Go back to an earlier checkpoint of a run: the next start of its training resumes there.

  python -m workflow.scripts.rewind RUN STEP

Later files are set aside, not removed. Nothing is trained."""

import argparse
from pathlib import Path

from workflow.lib.artifacts.layout import RESULTS
from workflow.lib.system.locks import exclusive
from workflow.lib.training.chosen_checkpoint import go_back, last_trained
from workflow.scripts.command import command_parser, run


def main(args: argparse.Namespace) -> None:
    checkpoints = last_trained(args.results / "checkpoints", args.run)
    with exclusive(checkpoints / ".lock", doing="training this run"):
        go_back(checkpoints, args.step, results=args.results / "runs" / args.run / "finetune")


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("step", metavar="STEP", type=int, help="step of the checkpoint")
    parser.add_argument("--results", type=Path, default=Path(RESULTS), help="(%(default)s)")
    run(main, parser)
