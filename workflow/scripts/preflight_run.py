"""Predict memory, disk and time of a run from shapes alone, choose its micro-batch, and refuse what cannot fit.

Reads config.json and the safetensors headers of the base model (never weights), the tokens manifest,
and this machine. Writes preflight.json, which `finetune` follows, and prints it as a table. A run that
does not fit ends with exit status 1 and the changes that would make it fit.
"""

import argparse
import logging
import shutil
from pathlib import Path

from workflow.lib.artifacts import provenance, write_json
from workflow.lib.config import RunConfig
from workflow.lib.errors import UserError
from workflow.lib.preflight import check_tokens, decide, document, read_machine, read_tokens
from workflow.lib.preflight_table import render
from workflow.lib.shapes import read_shape
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    settings = RunConfig.model_validate(args.config)
    shape = read_shape(args.model)
    manifest = read_tokens(args.tokens)
    check_tokens(manifest, settings, shape)
    machine = read_machine(settings.hardware)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.output.parent).free
    decision = decide(settings, shape, machine, manifest, disk_free_bytes=free)
    result = document(decision, settings, shape, machine, manifest)
    write_json(args.output, result | {"provenance": provenance()})
    show = logger.debug if args.brief and decision.fits else logger.info
    show("%s", render(result, run=args.run))
    if not decision.fits:
        raise UserError(f"run {args.run} does not fit: {decision.reason}.")


def parser() -> argparse.ArgumentParser:
    arguments = stage_parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="folder of the base model")
    arguments.add_argument("--tokens", type=Path, required=True, help="manifest.json of the tokens")
    arguments.add_argument("--output", type=Path, required=True, help="preflight.json to write")
    arguments.add_argument("--run", required=True, help="name of the run")
    arguments.add_argument(
        "--brief", action="store_true", help="keep the table of a run that fits to the log"
    )
    return arguments


if __name__ == "__main__":
    run(main, parser())
