"""Public models that ship with the workflow, so that a prediction needs no download.

`workflow/resources/models/shapes.json` holds sizes, published parameters and ids of the same shape
by hub id. `workflow.scripts.write_model_descriptions` makes `descriptions.json.gz` of it."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

from workflow.lib.model.architecture.model_shape import ModelShape, shape_of_document
from workflow.lib.system.files import read_json
from workflow.lib.system.near_names import near_names

SHAPES = Path(__file__).parents[3] / "resources" / "models" / "shapes.json"
DESCRIPTIONS = SHAPES.with_name("descriptions.json.gz")


@cache
def known_models() -> dict[str, str]:
    """Return the entry of every shipped model by hub id, including ids of the same shape."""
    return {
        name: hub_id
        for hub_id, entry in read_json(SHAPES).items()
        for name in (hub_id, *entry.get("same_shape", ()))
    }


def known_config(name: str) -> dict[str, Any] | None:
    """Return the config.json of a shipped model by hub id or its last part, in any case."""
    entry = _entry(name)
    config: dict[str, Any] | None = None if entry is None else read_json(SHAPES)[entry]["config"]
    return config


def known_shape(name: str) -> ModelShape | None:
    """Return the description of a shipped model, found as by `known_config`."""
    entry = _entry(name)
    return None if entry is None else shape_of_document(_descriptions()[entry])


@cache
def _descriptions() -> dict[str, dict[str, Any]]:
    descriptions: dict[str, dict[str, Any]] = json.loads(gzip.decompress(DESCRIPTIONS.read_bytes()))
    return descriptions


def _entry(name: str) -> str | None:
    wanted = name.lower()
    for hub_id, entry in known_models().items():
        if wanted in (hub_id.lower(), hub_id.lower().rpartition("/")[2]):
            return entry
    return None


def nearest_models(name: str) -> list[str]:
    """Return up to 5 shipped hub ids that are spelled like `name`."""
    by_short = {hub_id.lower().rpartition("/")[2]: hub_id for hub_id in known_models()}
    short = name.lower().rpartition("/")[2]
    return [by_short[near] for near in near_names(short, by_short, count=5)]
