"""State a run's files and measurements, so that others can check them: `certificate.json`.

Every file is first compared with its recorded SHA-256. Signed with `export.signing_key`, if one is
set. `snakemake --cores 1 verify` checks it."""

import argparse
import json
import logging
from pathlib import Path

from workflow.lib.artifacts.evaluation_record import ITEMS
from workflow.lib.evaluation.certificate import licence_of, packed, statement
from workflow.lib.settings.config import ExportConfig
from workflow.lib.system.checksums import RecordedFile, check_files, listed_files
from workflow.lib.system.files import file_sha256, write_json
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    key = ExportConfig.model_validate(args.config.get("export", {})).signing_key
    made = [file for folder in args.folders for file in listed_files(folder)]
    check_files(made)
    files = [*made, *map(hashed, [*args.files, args.evaluation / ITEMS])]
    said = statement(
        args.run,
        files,
        certificate=args.output,
        published=args.published,
        evaluation=args.evaluation,
        licences={"model": licence_of([args.model]), "data": licence_of(args.data)},
        require=args.require,
    )
    write_json(args.output, packed(said, None if key is None else Path(key)))
    signed = "not signed" if key is None else f"signed with {key}"
    logger.info("certificate of the run %s: %d files, %s", args.run, len(files), signed)


def hashed(path: Path) -> RecordedFile:
    return RecordedFile(path.parent, path.name, file_sha256(path))


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="run evaluation model output")
    parser.add_argument(
        "--folders", type=Path, nargs="+", required=True, help="folders with SHA256SUMS"
    )
    parser.add_argument("--files", type=Path, nargs="+", required=True, help="further files")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="raw data")
    parser.add_argument("--require", type=json.loads, required=True, help="evaluate.require, JSON")
    parser.add_argument("--published", type=Path, required=True, help="folder that is published")
    run(main, parser)
