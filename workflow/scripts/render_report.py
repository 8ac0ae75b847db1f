"""Render the report: one HTML page over all runs, and a comparison as CSV.

`--config` has the section `report`, the settings of each of `runs`, and the `folders` of each:
`{"folder": "results/runs/demo", "tokens": "results/tokens/pydocs-0123"}` (`RunFolders`)."""

import argparse

from workflow.lib.report.comparison import comparison_csv
from workflow.lib.report.html_page import render_page
from workflow.lib.report.run_results import Run, RunFolders, read_run
from workflow.lib.report.verdict import label
from workflow.lib.settings.config import ReportConfig
from workflow.lib.system.files import write_text
from workflow.lib.system.number_formats import count, duration, loss, size
from workflow.scripts.command import logger, stage_parser
from workflow.scripts.command import run as run_command


def main(args: argparse.Namespace) -> None:
    """Read every run, render, and write the page last: its existence means a complete report."""
    report = ReportConfig.model_validate(args.config["report"])
    changed = args.config["runs"]
    runs = [read_run(RunFolders(**folders)) for folders in args.config["folders"]]
    for run in runs:
        logger.info("%s", describe(run))
    write_text(args.comparison, comparison_csv(runs))
    page = render_page(runs, report=report, settings=changed)
    write_text(args.output, page)
    logger.info("report of %d run(s), %s: %s", len(runs), size(len(page)), args.output)


def describe(run: Run) -> str:
    reference, served = run.measured.reference, run.measured.served
    change = (
        f"held-out loss, {label(reference)} -> {label(served)}: {loss(reference.heldout.loss)} -> "
        f"{loss(served.heldout.loss)}, "
        if reference.heldout and served.heldout
        else ""
    )
    passed = f"{len(run.checks) - len(run.failed_checks)} of {len(run.checks)} checks passed"
    return (
        f"run {run.name}: {change}{count(run.summary.num_steps)} steps in "
        f"{duration(run.summary.elapsed_s)}, peak {size(run.summary.peak_bytes.measured)}, {passed}"
    )


if __name__ == "__main__":
    run_command(main, stage_parser(__doc__, needs="output comparison"))
