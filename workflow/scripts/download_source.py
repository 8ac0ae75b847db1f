"""Download a base model or the files of a dataset from the Hugging Face hub, at one commit, verified.

`--config` is `{"repo_id": "owner/name", "revision": null, "kind": "model", "files": null}`; of a dataset
(`"kind": "dataset"`), `files` lists paths in the repository. The folder `--output` appears when it is
complete; an interrupted download goes on where it stopped when the command is repeated.
"""

import argparse
import logging
from pathlib import Path

from workflow.lib import hub
from workflow.lib.artifacts import write_json
from workflow.lib.hub_errors import explained_errors
from workflow.scripts.command import run, stage_parser

logger = logging.getLogger("workflow")


def main(args: argparse.Namespace) -> None:
    """Resolve, choose, check the disk, download and verify, publish."""
    source = hub.Source(**args.config)
    with explained_errors(source), hub.partial_folder(args.output) as partial:
        commit = hub.resolve_commit(source)
        logger.info("%s at %s is commit %s", source.repo_id, source.revision or "main", commit)
        listing = hub.list_files(source, commit=commit)
        files = hub.choose_files(source, listing, commit=commit, folder=partial)
        hub.check_disk_space(source, files, folder=partial)
        sha256 = fetch_all(source, files, commit=commit, folder=partial)
        write_json(
            partial / hub.MANIFEST, hub.manifest(source, files, commit=commit, sha256=sha256)
        )
        hub.publish(partial, args.output, keep=[hub.MANIFEST, *sha256])


def fetch_all(
    source: hub.Source, files: list[hub.HubFile], *, commit: str, folder: Path
) -> dict[str, str]:
    """Download every file that `folder` lacks; return their SHA-256 by path."""
    total = sum(file.size for file in files)
    logger.info("%d files, %.3f GiB", len(files), total / 2**30)
    sha256 = {}
    for number, file in enumerate(files, start=1):
        logger.info("%d of %d: %s, %.3f GiB", number, len(files), file.path, file.size / 2**30)
        sha256[file.path] = hub.fetch_file(source, file, commit=commit, folder=folder)
    return sha256


def parser() -> argparse.ArgumentParser:
    """Return the command line of this stage."""
    options = stage_parser(__doc__)
    options.add_argument("--output", type=Path, required=True, help="folder that is created")
    return options


if __name__ == "__main__":
    run(main, parser())
