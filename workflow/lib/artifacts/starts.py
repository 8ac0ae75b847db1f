"""Starts of runs (`train.start_from`): other runs, adapters of this disk or of a hub.

A run's name takes precedence over a folder of this name. Every run that continues an adapter has
its settings, so they are resolved here, in the order of the runs, before anything depends on
them."""

from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from workflow.lib.artifacts import layout
from workflow.lib.artifacts.local_inputs import check_path
from workflow.lib.checkpoints.files.adapter_config import (
    adapter_settings,
    check_continued,
    check_rows,
    continued,
    read_adapter_config,
)
from workflow.lib.checkpoints.files.model_files import ADAPTER, fault_of_adapter
from workflow.lib.data.reading.sources import unexpanded
from workflow.lib.settings.config import RunConfig, Section, is_hub_id, path_exists
from workflow.lib.system.errors import UserError, setting_error

SETTING = "train.start_from"
BASE_SETTINGS = {"model": ("source", "revision", "add_tokens", "rope_scaling"), "quantize": None}


def with_starts(
    runs: Mapping[str, RunConfig], with_prefix: Callable[[str], str] = str
) -> dict[str, RunConfig]:
    """Return the runs, each with the run that it starts from and with the `lora` settings of the
    adapter that it continues. with_prefix: gives a folder of `layout` the module's prefix. Raises
    `UserError` for an unknown start, a circle, another base, or settings that the run
    contradicts."""
    done: dict[str, RunConfig] = {}
    for name in _in_order(runs):
        done[name] = _started(name, runs, done, with_prefix)
        if "start" in done[name].subjects and runs[name].train.start_from is None:
            bound = f"{SETTING} = null: there is no start to measure"
            change = "Remove start, or name an adapter in train.start_from"
            raise setting_error(f"evaluate.subjects (run {name})", "start", bound, change)
    return {name: done[name] for name in runs}


def _in_order(runs: Mapping[str, RunConfig]) -> list[str]:
    starts = {
        name: [start] if (start := run.train.start_from) is not None and start in runs else []
        for name, run in runs.items()
    }
    try:
        return [*TopologicalSorter(starts).static_order()]
    except CycleError as error:
        links: list[str] = error.args[1][::-1]  # each after the one that starts from it
        circle = ", ".join(f"{a} from {b}" for a, b in pairwise(links))
        raise setting_error(
            f"{SETTING} (run {links[0]})",
            links[1],
            f"the runs start from each other: {circle}",
            "Set it to null in one of them, or name another run or adapter",
        ) from None


def _started(
    name: str,
    runs: Mapping[str, RunConfig],
    done: Mapping[str, RunConfig],
    with_prefix: Callable[[str], str],
) -> RunConfig:
    run = runs[name]
    start = run.train.start_from
    if start is None:
        return run
    if start in done:
        other = done[start]
        differences = _other_base(run, other)
        lora = continued(
            run.lora, other.lora, run=name, start=start, follow=True, beside=differences
        )
        return run.starting_from(other, lora, key=layout.fingerprint(other))
    folder = Path(layout.start_adapter(run) or "")
    if is_hub_id(start):
        folder = Path(with_prefix(str(folder)))
        if (folder / ADAPTER).is_file():
            check_continued({"runs": {name: run}}, folder, start)
        return run
    _check_folder(name, start, runs=[other for other in runs if other != name])
    config = read_adapter_config(folder)
    settings = adapter_settings(config, folder)
    check_rows(config, run, run=name)
    lora = continued(run.lora, settings, run=name, start=start, follow=True, beside={})
    return run.starting_from(None, lora)


def _other_base(run: RunConfig, other: RunConfig) -> dict[str, tuple[object, object]]:
    """Return the settings of a run's base that differ from another's."""

    def plain(section: Section, key: str) -> object:
        value = getattr(section, key)
        return value.model_dump(mode="json") if isinstance(value, Section) else value

    return {
        f"{section}.{key}": (value, other_value)
        for section, keys in BASE_SETTINGS.items()
        for key in keys or type(getattr(run, section)).model_fields
        if (value := plain(getattr(run, section), key))
        != (other_value := plain(getattr(other, section), key))
    }


def _check_folder(name: str, start: str, *, runs: list[str]) -> None:
    """Raise `UserError` unless a path is the folder of an adapter that can be read."""
    if not path_exists(start):
        raise setting_error(
            f"{SETTING} (run {name})",
            start,
            f"it is no run, no folder and no hub id (owner/name); other runs are "
            f"{', '.join(runs) or 'none'}",
            f"{unexpanded(start)}Correct it",
        )
    check_path(SETTING, start, run=name)
    if not Path(start).is_dir():
        raise setting_error(SETTING, start, "it is a file", "Name the folder of the adapter")
    if fault := fault_of_adapter({path.name for path in Path(start).iterdir()}):
        raise UserError(f"run {name}: {setting_error(SETTING, start, *fault)}")
