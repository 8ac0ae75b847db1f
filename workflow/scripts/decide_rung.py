"""Decide which runs of a sweep continue from a rung, by paired losses on held-out documents."""

import argparse
import logging
from pathlib import Path

from workflow.lib.artifacts.evaluation_record import Evaluation
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance
from workflow.lib.artifacts.rungs import Rung, RungRun
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.evaluation.results import DRAWS
from workflow.lib.evaluation.rungs import by_document, decide
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json
from workflow.lib.system.number_formats import loss, signed
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    names = list(args.config["continued"])
    losses = dict(zip(names, map(heldout_losses, args.evaluations), strict=True))
    summaries = dict(zip(names, args.summaries, strict=True))
    hours = {name: read_record(path, Summary).device_hours for name, path in summaries.items()}
    found = [
        RungRun(
            **dict(decision),
            device_hours=hours[decision.run],
            continued=args.config["continued"][decision.run],
        )
        for decision in decide(losses, keep=args.config["keep"], **DRAWS)
    ]
    for each in found:
        logger.info("%s", describe(each, args.steps))
    rung = Rung(
        steps=args.steps,
        keep=args.config["keep"],
        documents=len(losses[names[0]]),
        runs=found,
        provenance=Provenance.now(),
    )
    write_checked_json(args.output, rung.as_json())


def heldout_losses(folder: Path) -> dict[int, tuple[float, int]]:
    path = folder / "tuned.json"
    heldout = read_record(path, Evaluation).heldout
    if heldout is None:
        raise UserError(f"{path}: has no held-out loss. Set evaluate.heldout to true.")
    return by_document(heldout.per_document)


def describe(found: RungRun, steps: int) -> str:
    ends = "" if found.behind_ci95 is None else " [{}, {}]".format(*map(signed, found.behind_ci95))
    what = "goes on" if found.goes_on else "ends here"
    return (
        f"rung {steps}, run {found.run}: held-out loss {loss(found.loss)}, behind the best by "
        f"{signed(found.behind)}{ends}: {what} ({found.reason})"
    )


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="output")
    parser.add_argument("--steps", type=int, required=True, help="optimizer steps of the rung")
    parser.add_argument(
        "--evaluations", type=Path, nargs="+", required=True, help="evaluations, in order of runs"
    )
    parser.add_argument(
        "--summaries", type=Path, nargs="+", required=True, help="summaries, in order of runs"
    )
    run(main, parser)
