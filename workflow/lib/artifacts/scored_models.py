"""The model whose scores a run's training reads: its files, and the folder of its scores.

`Needs.scores_of` names the setting that says it, as the objective needs: `start` and
`original` are words, a run's name takes precedence over a folder of this name, and all else is a
folder or a hub id. The scores' folder has a key of the model's identity, the tokens and k, so all
runs of a sweep share it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath
from typing import Any

from workflow.lib.artifacts import layout
from workflow.lib.artifacts.local_inputs import check_path
from workflow.lib.checkpoints.files.model_files import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    CONFIG,
    MODEL_PATTERNS,
)
from workflow.lib.settings.config import RunConfig, is_hub_id, path_exists
from workflow.lib.settings.objectives import START, needs_of
from workflow.lib.system.errors import setting_error
from workflow.lib.system.files import SUMS, short_hash

ORIGINAL = "original"
SCORED = "scored"  # kind of a download
FILES = (*MODEL_PATTERNS, ADAPTER)
RUN_ADAPTER = (ADAPTER_WEIGHTS, ADAPTER, SUMS)


@dataclass(frozen=True)
class ScoredModel:
    """A model that scores the tokens of a run. base: folder of an NF4 base, None if none is loaded;
    model: folder of an adapter on it or of a whole model, None for the base alone."""

    setting: str
    named: str
    base: str | None
    model: str | None
    files: tuple[str, ...]  # files of `model` that are inputs of a rule
    scores: str  # folder of the scores
    top_k: int
    download: dict[str, Any] | None = None  # settings of `download_source` for `model`

    @property
    def facts(self) -> dict[str, Any]:
        """Return what its scores depend on beside its files, as JSON."""
        return {"setting": self.setting, "named": self.named, "top_k": self.top_k}


def scored_models(runs: Mapping[str, RunConfig]) -> dict[str, ScoredModel]:
    """Return the scored model of each run that reads scores. Raises `UserError` for an unknown
    name, and for runs that wait for each other."""
    models = {name: model for name in runs if (model := _scored(name, runs)) is not None}
    _check_order(runs, {name: model.named for name, model in models.items()})
    return models


def made_folders(runs: Mapping[str, RunConfig], scored: Mapping[str, ScoredModel]) -> set[str]:
    """Return folders that the workflow makes, but that settings name like a user's own: downloads,
    models with added tokens, bases, adapters of runs."""
    downloads = {folder for run in runs.values() for folder in layout.download_dirs(run).values()}
    adapters = {f"{layout.stage_dir(name, 'consolidate')}/adapter" for name in runs}
    bases = {layout.base_dir(run) for run in runs.values()}
    extended = {layout.model_dir(run) for run in runs.values() if run.model.is_copied}
    hub_models = {model.model for model in scored.values() if model.model and model.download}
    return downloads | extended | adapters | bases | hub_models


def _scored(name: str, runs: Mapping[str, RunConfig]) -> ScoredModel | None:
    run = runs[name]
    setting = needs_of(run.train.objective).scores_of
    if setting is None:
        return None
    section, _, key = setting.partition(".")
    named: str = getattr(getattr(run, section), key)
    if named == START and setting != "distill.teacher":
        return None  # the training computes it
    top_k = run.distill.top_k if setting == "distill.teacher" else 0
    kind = _kind(name, named, setting, runs)
    identity, label, base, model, files = kind(run, named, runs)
    key = short_hash(
        [identity, layout.tokens_key(run), top_k, run.model.compute_dtype, run.model.attention]
    )
    label = re.sub(r"[^A-Za-z0-9._-]+", "_", label)
    download = None
    if kind is _hub_model:
        download = {"repo_id": named, "revision": None, "kind": SCORED, "files": None}
    scores = str(layout.RESULTS / "scores" / f"{label}-{key}")
    return ScoredModel(setting, named, base, model, tuple(files), scores, top_k, download)


ModelParts = tuple[list[Any], str, str | None, str | None, list[str]]
"""Identity, label, base, model and its files."""
Kind = Callable[[RunConfig, str, Mapping[str, RunConfig]], ModelParts]


def _kind(name: str, named: str, setting: str, runs: Mapping[str, RunConfig]) -> Kind:
    words = {START: _start_model, ORIGINAL: _original_model}
    where = f"{setting} (run {name})"
    if named in words:
        if named in runs:
            reason = f"{START} and {ORIGINAL} are words of this setting, and a run has this name"
            raise setting_error(where, named, reason, "Rename the run")
        return words[named]
    if named in runs:
        return _run_model
    if is_hub_id(named):
        return _hub_model
    others = ", ".join(other for other in runs if other != name) or "none"
    change = f"Name {START}, {ORIGINAL}, another run ({others}), a folder or a hub id (owner/name)"
    if not path_exists(named):
        raise setting_error(where, named, "it is no run, no folder here and no hub id", change)
    check_path(setting, named, run=name)
    if not any((Path(named) / file).is_file() for file in (CONFIG, ADAPTER)):
        reason = f"the folder has neither {CONFIG} (a model) nor {ADAPTER} (an adapter)"
        raise setting_error(where, named, reason, change)
    return _folder_model


def _start_model(run: RunConfig, named: str, runs: Mapping[str, RunConfig]) -> ModelParts:
    start, base = run.train.start_from, layout.base_dir(run)
    if start is not None and start in runs:
        return _run_model(run, start, runs)
    identity = [layout.base_key(run), *([start] if start else [])]
    return identity, run.model.name, base, layout.start_adapter(run), layout.start_files(run)


def _original_model(run: RunConfig, named: str, runs: Mapping[str, RunConfig]) -> ModelParts:
    folder = layout.model_dir(run)
    files = layout.local_files(folder, MODEL_PATTERNS)
    return [layout.model_key(run)], run.model.name, None, folder, files


def _run_model(run: RunConfig, named: str, runs: Mapping[str, RunConfig]) -> ModelParts:
    other, folder = runs[named], f"{layout.stage_dir(named, 'consolidate')}/adapter"
    files = [f"{folder}/{file}" for file in RUN_ADAPTER]
    return [named, layout.fingerprint(other)], named, layout.base_dir(other), folder, files


def _folder_model(run: RunConfig, named: str, runs: Mapping[str, RunConfig]) -> ModelParts:
    is_adapter = (Path(named) / ADAPTER).is_file()
    base = layout.base_dir(run) if is_adapter else None
    identity = [named, layout.base_key(run) if is_adapter else None]
    return identity, Path(named).resolve().name, base, named, layout.local_files(named, FILES)


def _hub_model(run: RunConfig, named: str, runs: Mapping[str, RunConfig]) -> ModelParts:
    """Only the downloaded files show whether it is a model or an adapter on the run's base."""
    label = PurePosixPath(named).name
    folder = str(layout.RESULTS / "hub" / SCORED / f"{label}-{short_hash([named])}")
    return [named, layout.base_key(run)], label, layout.base_dir(run), folder, [folder]


def _check_order(runs: Mapping[str, RunConfig], named: Mapping[str, str]) -> None:
    predecessors = {
        name: [x for x in (named.get(name), run.train.start_from) if x in runs]
        for name, run in runs.items()
    }
    try:
        TopologicalSorter(predecessors).prepare()
    except CycleError as error:
        way: list[str] = error.args[1][::-1]  # each after the one that waits for it
        setting = needs_of(runs[way[0]].train.objective).scores_of or "train.start_from"
        raise setting_error(
            f"{setting} (run {way[0]})",
            named.get(way[0], runs[way[0]].train.start_from),
            f"these runs would wait for each other: {' -> '.join(way)}",
            "Name another model in one of them",
        ) from None
