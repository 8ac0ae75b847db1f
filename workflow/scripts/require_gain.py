"""Fail the workflow if a tuned model does not gain what `evaluate.require` demands.

The gain is over the NF4 base. Reads finished evaluations only, so nothing is lost when it fails;
writes `requirements.json` when all are met.
"""

import argparse
import logging
from pathlib import Path

from workflow.lib.artifacts.evaluation_record import Requirements, TunedEvaluation
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Provenance
from workflow.lib.report.required_gains import refuse_unmet, verdicts
from workflow.lib.system.files import write_json
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    by_run = {}
    for name, settings in args.config.items():
        path = args.runs_dir / name / "evaluate_run" / "tuned.json"
        tuned = read_record(path, TunedEvaluation)
        by_run[name] = verdicts(settings["require"], tuned, by=settings["require_by"])
    refuse_unmet(by_run)
    requirements = Requirements(runs=by_run, provenance=Provenance.now())
    write_json(args.output, requirements.as_json())
    logger.info("every gain that evaluate.require demands is reached: %s", ", ".join(by_run))


if __name__ == "__main__":
    parser = stage_parser(__doc__)
    parser.add_argument("--runs-dir", type=Path, required=True, help="folder with a folder a run")
    parser.add_argument("--output", type=Path, required=True, help="requirements.json to write")
    run(main, parser)
