"""Hold files against a certificate, and compute its numbers again from the items. Needs no GPU.

Files are looked for beside the certificate, as they are published, and where the run made them.
"""

import argparse
import logging
from pathlib import Path

from workflow.lib.evaluation.certificate import verify
from workflow.lib.system.number_formats import some_of
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    found = verify(args.certificate, signed_by=args.signed_by)
    said, total = found.said.predicate, len(found.said.subject)
    logger.info(
        "%s holds for the run %s, %s: %d of %d files are those that were certified; statistics of "
        "%d models follow from their items",
        args.certificate,
        said.run,
        found.signer,
        total - len(found.absent),
        total,
        len(said.measured),
    )
    if found.absent:
        logger.info("not here, so not checked: %s", some_of(found.absent))


if __name__ == "__main__":
    parser = stage_parser(__doc__, config_required=False)
    parser.add_argument("--certificate", type=Path, required=True, help="certificate.json")
    parser.add_argument("--signed-by", type=Path, help="public key that must have signed it")
    run(main, parser)
