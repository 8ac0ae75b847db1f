"""The shipped shapes: their parameters add up to what was published, and names are found as people
write them.
"""

from pathlib import Path
from typing import Any

import pytest

from workflow.lib.model.architecture.model_shape import shape_of_config
from workflow.lib.model.architecture.shipped_shapes import (
    SHAPES,
    known_config,
    known_models,
    nearest_models,
)
from workflow.lib.system.files import read_json

ENTRIES: dict[str, dict[str, Any]] = read_json(SHAPES)


@pytest.mark.parametrize("hub_id", ENTRIES)
def test_parameters_are_those_published(hub_id: str) -> None:
    shape = shape_of_config(ENTRIES[hub_id]["config"], origin=Path(hub_id))
    assert shape.quantized_weights + shape.plain_weights == ENTRIES[hub_id]["parameters"]


def test_every_name_stands_once() -> None:
    names = [
        name for hub_id, entry in ENTRIES.items() for name in (hub_id, *entry.get("same_shape", ()))
    ]
    assert len(names) == len(set(names)) == len(known_models())


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-70B", "llama-3.1-70b", "Llama-3.3-70B-Instruct"]
)
def test_model_is_found_with_or_without_owner_in_any_case(name: str) -> None:
    assert known_config(name) == ENTRIES["meta-llama/Llama-3.1-70B"]["config"]


def test_unknown_model_has_near_names() -> None:
    assert known_config("Qwen2.5-77B") is None
    assert "Qwen/Qwen2.5-72B" in nearest_models("Qwen2.5-77B")
