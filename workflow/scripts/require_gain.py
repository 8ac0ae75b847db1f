"""Fail the workflow if the served model does not gain what `evaluate.require` demands.

The gain is over the original model, or over the NF4 base if that was not measured. Reads finished
evaluations only, so nothing is lost when it fails; writes `requirements.json` when all are met."""

import argparse
from pathlib import Path

from workflow.lib.artifacts.evaluation_record import Requirements
from workflow.lib.artifacts.records import Provenance
from workflow.lib.report.run_results import reward_gain
from workflow.lib.report.verdict import read_measured, refuse_unmet, verdicts
from workflow.lib.system.files import write_checked_json
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    by_run = {}
    for name, settings in args.config.items():
        rewards = [Path(path) for path in settings.get("rewards", [])[1:]]
        gain = reward_gain(*rewards) if rewards else None
        measured = read_measured(args.runs_dir / name / "evaluate_run", run=name, reward_gain=gain)
        by_run[name] = verdicts(settings["require"], measured, by=settings["require_by"])
    refuse_unmet(by_run)
    requirements = Requirements(runs=by_run, provenance=Provenance.now())
    write_checked_json(args.output, requirements.as_json())
    logger.info("every gain that evaluate.require demands is reached: %s", ", ".join(by_run))


if __name__ == "__main__":
    run(main, stage_parser(__doc__, needs="runs_dir output"))
