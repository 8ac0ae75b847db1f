"""Render the report: one HTML page over all runs, a comparison as CSV, and figures for papers.

Example:
    python -m workflow.scripts.render_report --config '{"report": {}, "runs": {"demo": {}}}' \\
        --runs-dir results/runs --run demo \\
        --tokens demo=results/tokens/pydocs-0123456789ab --output results/report/report.html \\
        --comparison results/report/comparison.csv --figures results/report/figures
"""

import argparse
import logging
from pathlib import Path

from workflow.lib.report.comparison import comparison_csv
from workflow.lib.report.html_page import render_page
from workflow.lib.report.paper_figures import write_paper_figures
from workflow.lib.report.run_results import Run, read_runs
from workflow.lib.report.verdict import label
from workflow.lib.settings.config import ReportConfig
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import write_text
from workflow.lib.system.number_formats import count, duration, loss, size
from workflow.scripts.command import run as run_command
from workflow.scripts.command import stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    """Read every run, render, and write the page last: where it is, all of it is."""
    report = ReportConfig.model_validate(args.config["report"])
    changed = args.config["runs"]
    runs = read_runs(
        args.runs_dir,
        names=args.run,
        tokens=read_tokens(args.tokens),
        gguf=args.gguf,
    )
    for run in runs:
        logger.info("%s", describe(run))
    write_text(args.comparison, comparison_csv(runs))
    write_paper_figures(args.figures, runs)
    page = render_page(runs, report=report, settings=changed)
    write_text(args.output, page)
    logger.info("report of %d run(s), %s: %s", len(runs), size(len(page)), args.output)


def describe(run: Run) -> str:
    """Return a run's result as one line."""
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


def read_tokens(pairs: list[str]) -> dict[str, Path]:
    """Turn `NAME=DIR` options into a mapping; raises `UserError` for one without name or folder."""
    tokens = {}
    for pair in pairs:
        name, _, folder = pair.partition("=")
        if not name or not folder:
            raise setting_error(
                "--tokens", pair, "must be NAME=DIR", "Give a run and its tokens folder"
            )
        tokens[name] = Path(folder)
    return tokens


def parser() -> argparse.ArgumentParser:
    """Return the stage's command line."""
    options = stage_parser(__doc__)
    options.add_argument("--runs-dir", type=Path, required=True, help="folder with a folder a run")
    options.add_argument("--run", action="append", required=True, metavar="NAME", help="a run")
    options.add_argument(
        "--tokens", nargs="+", action="extend", required=True, metavar="NAME=DIR", help="its tokens"
    )
    options.add_argument("--gguf", nargs="*", default=[], help="the runs that export GGUF files")
    options.add_argument("--output", type=Path, required=True, help="the page, HTML")
    options.add_argument("--comparison", type=Path, required=True, help="the table, CSV")
    options.add_argument("--figures", type=Path, required=True, help="folder of PNG files")
    return options


if __name__ == "__main__":
    run_command(main, parser())
