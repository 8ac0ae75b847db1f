"""Render a benchmark's page and figure, named `<model>_<hardware>_<date>`, from the measurements of
its cases.
"""

import argparse
import logging
import shutil
from pathlib import Path

from workflow.lib.artifacts.benchmark_record import BenchmarkRow
from workflow.lib.artifacts.read_records import read_records
from workflow.lib.benchmark.page import measured_rows, page_name, render_page, write_figure
from workflow.lib.system.artifact_files import write_lines
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import put_in_place, write_text
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    rows = [row for path in args.measurements for row in read_records(path, BenchmarkRow)]
    if not rows:
        raise UserError("there is no measurement in the files that --measurements names.")
    name = page_name(rows)
    partial = args.output.with_name(f".{args.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_lines(partial / "measurements.jsonl", (row.as_json() for row in rows))
    if measured_rows(rows):
        write_figure(partial / f"{name}.png", rows)
    write_text(partial / f"{name}.md", render_page(rows, figure=f"{name}.png"))
    put_in_place(partial, args.output)
    measured = len(measured_rows(rows))
    logger.info("%d of %d cases measured: %s", measured, len(rows), args.output / f"{name}.md")


def parser() -> argparse.ArgumentParser:
    arguments = stage_parser(__doc__, config_required=False)
    arguments.add_argument(
        "--measurements", type=Path, nargs="+", required=True, help="JSON Lines, joined"
    )
    arguments.add_argument("--output", type=Path, required=True, help="folder of page and figure")
    return arguments


if __name__ == "__main__":
    run(main, parser())
