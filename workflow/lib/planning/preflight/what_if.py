"""Preflight without a run: any model on any GPUs, from a few words instead of a config, files and a
machine.

It makes the same decision as `preflight`, for an imagined machine (with no other load) and imagined
tokens (rows without padding, every token trained)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import hf_hub_download

from workflow.lib.data.reading.hub_download import Source, explained_errors
from workflow.lib.data.reading.sources import unexpanded
from workflow.lib.model.architecture.model_shape import ModelShape
from workflow.lib.model.architecture.shipped_shapes import known_config, known_shape, nearest_models
from workflow.lib.planning.machine import Machine, imagined_machine
from workflow.lib.planning.probes import read_probes
from workflow.lib.planning.token_counts import TokenCounts
from workflow.lib.settings.config import (
    NOT_VALID,
    HardwareConfig,
    RunConfig,
    is_hub_id,
    load_config,
)
from workflow.lib.settings.yaml_files import misread_number
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.files import read_json
from workflow.lib.system.gpu_models import GpuModel
from workflow.lib.system.units import GIB

NAME = "what-if"
MISSING = "no such folder, file or shipped model"
MOST_ROWS = 10**12


def find_shape(
    model: str, *, revision: str | None, describe: Callable[[Path], ModelShape]
) -> ModelShape:
    """Return the shape of a local folder, a config.json, a shipped model, or a hub model's
    config.json. describe: takes torch. Raises `UserError` with the nearest shipped names."""
    path = Path(model)
    if model and path.exists():
        return describe(path)
    shipped = known_shape(model) if revision is None else None
    if shipped is not None:
        return shipped
    if is_hub_id(model):
        return describe(_download_config(model, revision))
    raise _unknown(model, MISSING)


def find_config(model: str, *, revision: str | None) -> dict[str, Any]:
    """Return the config.json of a model that `find_shape` finds."""
    path = Path(model)
    config = known_config(model) if revision is None and not path.exists() else None
    if config is not None:
        return config
    if not path.exists():
        if not is_hub_id(model):
            raise _unknown(model, MISSING)
        path = _download_config(model, revision)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise _unknown(model, "the folder has no config.json")
    document: dict[str, Any] = read_json(file)
    return document


def _download_config(model: str, revision: str | None) -> Path:
    source = Source(repo_id=model, revision=revision, kind="model")
    try:
        with explained_errors(source):
            return Path(hf_hub_download(model, "config.json", revision=revision))
    except UserError as error:
        raise _unknown(
            model, f"it is not shipped, and the hub does not give it ({error})"
        ) from None


def _unknown(model: str, why: str) -> UserError:
    near = nearest_models(model)
    change = f"Did you mean {', '.join(near)}?" if near else "Give a folder or a config.json"
    return setting_error("--model", model, why, unexpanded(model) + change.rstrip("?"))


def machine_by_hand(
    gpus: tuple[int, GpuModel], *, asked_gib: float | None, hardware: HardwareConfig
) -> Machine:
    """Return `hardware.nodes` such machines, with `asked_gib` or the usual host memory."""
    if asked_gib is not None and not 0 < asked_gib <= 1e6:
        bound = "it must be above 0 and at most a million"
        raise setting_error("--host-gib", asked_gib, bound, "Give the host's GiB")
    count, gpu = gpus
    origin = "--host-gib" if asked_gib is not None else "hardware.host_memory_gib"
    allowed = hardware.host_memory_gib
    if asked_gib is None and not isinstance(allowed, str):
        asked_gib = allowed
    if asked_gib is None:
        asked_gib = count * gpu.host_gib
        origin = "what machines with such GPUs usually have; --host-gib says how much it is"
    host_bytes = int(asked_gib * GIB)
    machine = imagined_machine(count, gpu, nodes=hardware.nodes, host_bytes=host_bytes)
    return replace(machine, imagined_host=origin, probes=read_probes())


SAID_BY = {
    f"hardware.{key}": "--gpus says which GPUs there are"
    for key in ("gpus", "gpu_model", "cpu_processes")
}


def settings_of(
    changes: Sequence[str], *, seq_len: int, rank: int, processes: int, batch: int | None
) -> RunConfig:
    """Return the default settings with `changes` (`train.epochs=1`, as in YAML); rows of a step:
    the smallest multiple of the processes from 16 on. processes: of a node. Raises as
    `load_config`."""
    document: dict[str, Any] = {
        "data": {"seq_len": seq_len},
        "lora": {"r": rank},
        "train": {"epochs": 1} | ({} if batch is None else {"global_batch_size": batch}),
        "runs": {NAME: {}},
    }
    for change in changes:
        key, equals, value = change.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot:
            raise setting_error(
                "--set", change, "it is not section.key=value", "Write it like train.epochs=1"
            )
        if key in SAID_BY:
            raise setting_error("--set", change, SAID_BY[key], "Remove it")
        try:
            document.setdefault(section, {})[name] = parsed = yaml.safe_load(value)
        except (yaml.YAMLError, TypeError, ValueError) as error:
            raise setting_error(
                "--set", change, f"it cannot be read ({error})", "Correct it"
            ) from None
        if (finding := misread_number(value, parsed)) is not None:
            raise UserError(f"--set {change}: {finding}.")
    nodes = document.get("hardware", {}).get("nodes", 1)
    processes *= nodes if isinstance(nodes, int) and nodes > 0 else 1  # else refused below
    document["train"].setdefault("global_batch_size", math.ceil(16 / processes) * processes)
    try:
        return load_config(document)[1][NAME]
    except UserError as error:
        raise UserError(str(error).removeprefix(NOT_VALID).strip()) from None


def imagined_tokens(shape: ModelShape, *, seq_len: int, rows: int) -> TokenCounts:
    """Return the counts of `rows` full trained rows; raises `UserError` if there are none."""
    if not 1 <= rows <= MOST_ROWS:
        bound = f"it must be 1 to {MOST_ROWS:,}"
        raise setting_error("--rows", rows, bound, "Give the rows of the training data")
    return TokenCounts(
        seq_len=seq_len,
        vocab_size=shape.vocab_size,
        heldout_tokens=0,
        packed_rows=rows,
        trained_tokens=rows * seq_len,
    )
