"""Download a base model, an adapter or files of a dataset from the Hugging Face hub, and verify
them.

All are of one commit. `--config` is `{"repo_id": "owner/name", "revision": null, "kind": "model",
"files": null}`; of a dataset (`"kind": "dataset"`), `files` lists paths in the repository. The
folder `--output` appears when it is complete; a repeated command resumes an interrupted
download."""

import argparse
from pathlib import Path
from typing import Any

from workflow.lib.checkpoints.files.adapter_config import check_continued
from workflow.lib.checkpoints.files.config_file import read_config
from workflow.lib.checkpoints.files.model_files import ADAPTER
from workflow.lib.data.reading import hub_download as hub
from workflow.lib.planning.preflight.checks import CHECKS_HELP, check_models
from workflow.lib.system.environment import importing
from workflow.lib.system.files import write_checked_json
from workflow.scripts.command import add_settings, logger, run, stage_parser


def main(args: argparse.Namespace) -> None:
    """Resolve, choose, check the disk, download and verify, publish."""
    source = hub.Source(**args.config)
    with hub.explained_errors(source):
        partial = hub.partial_folder(args.output)
        commit, licence, listing = hub.list_files(source)
        logger.info("%s at %s is commit %s", source.repo_id, source.revision or "main", commit)
        paths = [file.path for file in listing]
        check_runs(args.checks or {}, source, paths, commit=commit, folder=partial)
        chosen = hub.choose_files(source, paths, commit=commit, folder=partial)
        files = sorted((f for f in listing if f.path in chosen), key=lambda file: file.path)
        hub.check_disk_space(source, {f.path: f.size for f in files}, folder=partial)
        logger.info("%d files, %.3f GiB", len(files), sum(f.size for f in files) / 2**30)
        hub.fetch(source, chosen, commit=commit, folder=partial)
        record = hub.record(source, files, commit=commit, licence=licence, folder=partial)
        write_checked_json(partial / hub.MANIFEST, record)
        hub.publish(partial, args.output, keep=[hub.MANIFEST, *chosen])


def check_runs(
    checks: dict[str, Any], source: hub.Source, paths: list[str], *, commit: str, folder: Path
) -> None:
    """Refuse settings that cannot work with model or adapter before its weights are downloaded."""
    if source.kind == "adapter" and ADAPTER in paths:
        config = hub.fetch_first(source, ADAPTER, commit=commit, folder=folder)
        check_continued(checks, config.parent, source.repo_id)
        return
    if not checks.get("runs") or "config.json" not in paths:  # a dataset; or no model: refused next
        return
    config = hub.fetch_first(source, "config.json", commit=commit, folder=folder)
    # Loading torch takes seconds, and a dataset needs none.
    with importing():
        from workflow.lib.model.describe_model import describe_file

    check_models(checks, describe_file(config), read_config(config))


if __name__ == "__main__":
    parser = stage_parser(__doc__, needs="output")
    add_settings(parser, "--checks", help=CHECKS_HELP)
    run(main, parser)
