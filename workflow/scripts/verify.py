"""Compare files with a certificate, and compute its numbers again from the items. Needs no GPU.

Files are searched beside the certificate, under their published names, and in the run's folders. A
repository of the Hugging Face hub is downloaded to its cache."""

import argparse
import logging
import re
from pathlib import Path

from huggingface_hub import snapshot_download

from workflow.lib.artifacts.records import CERTIFICATE
from workflow.lib.data.reading.hub_download import Source, explained_errors
from workflow.lib.evaluation.certificate import verify
from workflow.lib.settings.errors_in_words import HUB_REPO
from workflow.lib.system.number_formats import some_of
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    certificate = certificate_in(args.certificate)
    found = verify(certificate, signed_by=args.signed_by)
    said, total = found.said.predicate, len(found.said.subject)
    logger.info(
        "%s holds for the run %s, %s: %d of %d files are those that were certified; statistics of "
        "%d models follow from their items",
        certificate,
        said.run,
        found.signer,
        total - len(found.absent),
        total,
        len(said.measured),
    )
    if found.absent:
        logger.info("not here, so not checked: %s", some_of(found.absent))


def certificate_in(named: str) -> Path:
    """Return the path of the certificate in a file, a folder or a hub id."""
    path = Path(named)
    if not path.exists() and re.match(HUB_REPO, named):
        with explained_errors(Source(named, None, "certificate")):
            path = Path(snapshot_download(named))
    return path / CERTIFICATE if path.is_dir() else path


if __name__ == "__main__":
    parser = stage_parser(__doc__, config_required=False)
    parser.add_argument("--certificate", required=True, help="file, folder or hub id")
    parser.add_argument("--signed-by", type=Path, help="public key that must have signed it")
    run(main, parser)
