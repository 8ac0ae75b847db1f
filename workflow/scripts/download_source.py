"""Download a base model or files of a dataset from the Hugging Face hub, and verify them.

All are of one commit. `--config` is `{"repo_id": "owner/name", "revision": null, "kind": "model",
"files": null}`; of a dataset (`"kind": "dataset"`), `files` lists paths in the repository. The
folder `--output` appears when it is complete; an interrupted download goes on where it stopped when
the command is repeated.
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from workflow.lib.data.reading import hub_download
from workflow.lib.data.reading.hub_errors import explained_errors
from workflow.lib.planning.preflight.checks import CHECKS_HELP, check_models
from workflow.lib.system.environment import importing
from workflow.lib.system.files import write_checked_json
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    """Resolve, choose, check the disk, download and verify, publish."""
    source = hub_download.Source(**args.config)
    with explained_errors(source), hub_download.partial_folder(args.output) as partial:
        commit = hub_download.resolve_commit(source)
        logger.info("%s at %s is commit %s", source.repo_id, source.revision or "main", commit)
        listing = hub_download.list_files(source, commit=commit)
        check_runs(args.checks, source, listing, commit=commit, folder=partial)
        files = hub_download.choose_files(source, listing, commit=commit, folder=partial)
        hub_download.check_disk_space(source, files, folder=partial)
        sha256 = fetch_all(source, files, commit=commit, folder=partial)
        write_checked_json(
            partial / hub_download.MANIFEST,
            hub_download.manifest(source, files, commit=commit, sha256=sha256),
        )
        hub_download.publish(partial, args.output, keep=[hub_download.MANIFEST, *sha256])


def check_runs(
    checks: dict[str, Any],
    source: hub_download.Source,
    listing: list[hub_download.HubFile],
    *,
    commit: str,
    folder: Path,
) -> None:
    """Refuse settings that cannot work with the model before its weights are downloaded."""
    configs = [file for file in listing if file.path == "config.json"]
    if not checks.get("runs") or not configs:  # a dataset; or no model, which is told next
        return
    hub_download.fetch_file(source, configs[0], commit=commit, folder=folder)
    # Loading torch takes seconds, and a dataset needs none.
    with importing():
        from workflow.lib.model.describe_model import describe_file

    check_models(checks, describe_file(folder / "config.json"))


def fetch_all(
    source: hub_download.Source, files: list[hub_download.HubFile], *, commit: str, folder: Path
) -> dict[str, str]:
    """Download every file that `folder` lacks; return their SHA-256 by path."""
    total = sum(file.size for file in files)
    logger.info("%d files, %.3f GiB", len(files), total / 2**30)
    sha256 = {}
    for number, file in enumerate(files, start=1):
        logger.info("%d of %d: %s, %.3f GiB", number, len(files), file.path, file.size / 2**30)
        sha256[file.path] = hub_download.fetch_file(source, file, commit=commit, folder=folder)
    return sha256


def parser() -> argparse.ArgumentParser:
    """Return the command line of this stage."""
    options = stage_parser(__doc__)
    options.add_argument("--checks", type=json.loads, default={}, help=CHECKS_HELP)
    options.add_argument("--output", type=Path, required=True, help="folder that is created")
    return options


if __name__ == "__main__":
    run(main, parser())
