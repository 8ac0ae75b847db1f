"""Runs whose models and data lie in an object store: what their settings may name, and what travels
with the sources.

Where no disk is shared, Snakemake fetches the inputs of a job from the store and brings its outputs
there. A path of the settings is then one below the store's prefix. Chat templates, task files and
measurements are part of the workflow instead: Snakemake packs what Git tracks, and every job
unpacks that.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from workflow.lib.artifacts.layout import dataset_paths
from workflow.lib.data.reading.sources import MAGIC
from workflow.lib.settings.config import RunConfig, is_hub_id
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import file_sha256, short_hash


def check_stored_paths(name: str, run: RunConfig, *, sent_from_here: bool) -> None:
    """Raise `UserError` if a path of the run cannot be one in the object store, or a file cannot
    travel.

    sent_from_here: this is the Snakemake that sends the jobs, so Git can be asked; a job has no
    repository.
    """
    if not is_hub_id(run.model.source):
        _check_stored("model.source", run.model.source, name)
    if run.data.source is None:
        for path in dataset_paths(run):
            _check_stored("data", path, name)
    more = [
        (key, path)
        for key, path in (
            ("hardware.calibration", run.hardware.calibration),
            ("quantize.calibration_text", run.quantize.calibration_text),
        )
        if path
    ]
    for key, path in [*_travellers(run, tasks=True), *more]:
        _check_traveller(key, path, name, sent_from_here=sent_from_here)


def travelling_files(run: RunConfig, *, tasks: bool) -> str:
    """Return a short hash of the chat template, and with `tasks` of the task files too, that travel
    with the sources.
    """
    roots = [Path(path) for _, path in _travellers(run, tasks=tasks)]
    files = sorted(file for root in roots for file in [root, *root.rglob("*")] if file.is_file())
    return short_hash([[str(file), file_sha256(file)] for file in files])


def _travellers(run: RunConfig, *, tasks: bool) -> list[tuple[str, str]]:
    named = [("data.chat_template", run.data.chat_template)]
    if tasks:
        named.append(("evaluate.tasks_dir", run.evaluate.tasks_dir))
    return [(key, path) for key, path in named if path]


def _check_stored(key: str, path: str, name: str) -> None:
    """Refuse what names nothing in a store: an absolute path, a way out, a glob; and what only
    looks like a hub id.
    """
    parts = PurePosixPath(path).parts
    setting = f"{key} (run {name})"
    if path.startswith(("/", "~", "-")) or ".." in parts:
        bound = "with an object store, a path is one below its prefix"
        raise setting_error(
            setting, path, bound, "Upload the files there, or name a repository of the hub"
        )
    if MAGIC.search(path) or "{" in path or "}" in path:
        bound = "an object store is not searched for patterns"
        raise setting_error(setting, path, bound, "Name files or a folder")
    if key == "model.source" and len(parts) == 2 and not path.startswith("."):
        bound = "a folder of this name is here, but a job elsewhere would take it for a hub id"
        raise setting_error(setting, path, bound, f"Write ./{path} for the folder in the store")


def _check_traveller(key: str, path: str, name: str, *, sent_from_here: bool) -> None:
    setting = f"{key} (run {name})"
    fix = (
        "Put it into the folder that you run in, which is a clone of the workflow, and `git add` it"
    )
    if path.startswith(("/", "~", "-")) or ".." in PurePosixPath(path).parts:
        raise setting_error(setting, path, "no shared disk: it travels with the sources", fix)
    if not Path(path).exists():
        raise setting_error(setting, path, "there is no such file or folder", fix)
    if sent_from_here and not _tracked(["git", "ls-files", "--", path]):
        bound = "jobs elsewhere get only files that Git tracks"
        raise setting_error(setting, path, bound, fix)


def _tracked(command: Sequence[str]) -> bool:
    """Tell whether Git lists anything; without Git or a repository it lists nothing."""
    try:
        return bool(subprocess.run(command, capture_output=True, text=True).stdout)
    except OSError:
        return False
