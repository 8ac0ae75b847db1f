"""Upload the adapter, the merged model or the GGUF files of a run to the Hugging Face hub, with the
model card.

Nothing is uploaded if a check of the run failed, or if a file names a folder of this machine. The
repository is private unless `export.hub_public` is set; an existing one keeps its visibility. The
token is `HF_TOKEN`, or that of `hf auth login`. Writes `published.json`."""

import argparse

from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import Parity
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.export.publishing import Publication, refuse_failed, refuse_private, upload
from workflow.lib.report.model_card import needs_folder
from workflow.lib.settings.config import ExportConfig
from workflow.lib.system.checksums import check_files, listed_files
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import provenance, write_checked_json
from workflow.scripts.command import logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    settings = ExportConfig.model_validate(args.config["export"])
    refuse_failed(read_record(args.summary, Summary), read_record(args.parity, Parity))
    check_files(listed_files(args.folder))
    publication = Publication(
        folder=args.folder,
        card=args.card,
        form=settings.hub_form,
        repo_id=str(settings.hub_repo),
        private=not settings.hub_public,
    )
    if settings.hub_form == "adapter" and needs_folder(args.card.read_text(encoding="utf-8")):
        raise UserError(
            f"Nothing is published: {args.card} loads the adapter on 4-bit weights that only this "
            "machine has. Upload a copy of the base's folder below results/base and name it "
            "(export.nf4_base_id), or serve another form (evaluate.served), and run again."
        )
    refuse_private(publication)
    address = upload(publication, message=f"{settings.hub_form} of the run {args.run}")
    write_checked_json(args.output, {"commit_url": address, "provenance": provenance()})
    logger.info("%s of the run %s: %s", settings.hub_form, args.run, address)


if __name__ == "__main__":
    run(main, stage_parser(__doc__, needs="run folder card summary parity output"))
