"""The shipped models: their descriptions add up to the parameters that were published, are what
building the model gives, and names are found as people write them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from workflow.lib.model.architecture.model_shape import shape_of_document
from workflow.lib.model.architecture.shipped_shapes import (
    DESCRIPTIONS,
    SHAPES,
    known_config,
    known_models,
    known_shape,
    nearest_models,
)
from workflow.lib.model.describe_model import describe_config
from workflow.lib.system.files import read_json

ENTRIES: dict[str, dict[str, Any]] = read_json(SHAPES)
DESCRIBED: dict[str, Any] = json.loads(gzip.decompress(DESCRIPTIONS.read_bytes()))
# A small one, and one of each kind: windows by turns, norms behind, a multimodal checkpoint,
# experts, short convolutions, sinks, LongRoPE.
REBUILT = (
    "HuggingFaceTB/SmolLM2-135M",
    "google/gemma-3-270m",
    "google/gemma-2-2b",
    "allenai/OLMo-2-0425-1B",
    "CohereLabs/c4ai-command-r7b-12-2024",
    "google/gemma-3-4b-pt",
    "allenai/OLMoE-1B-7B-0924",
    "LiquidAI/LFM2-1.2B",
    "openai/gpt-oss-20b",
    "microsoft/Phi-4-mini-instruct",
)


def test_at_least_80_models_ship_of_20_families():
    assert len(ENTRIES) >= 80
    assert len({entry["family"] for entry in DESCRIBED.values()}) >= 20


def test_parameters_are_those_published():
    """In billions where no exact number is published, rounded or cut to so many digits; stored
    buffers are counted too."""
    wrong = {}
    for hub_id, entry in ENTRIES.items():
        shape = shape_of_document(DESCRIBED[hub_id])
        counted = shape.quantized_weights + shape.plain_weights
        known, bound = entry.get("parameters"), 0.0
        if "billions" in entry:
            decimals = str(entry["billions"]).partition(".")[2]
            known = entry["billions"] * 1e9
            bound = max(1e9 * 0.1 ** len(decimals), 0.005 * known)
        if abs(counted - known) > bound:
            wrong[hub_id] = (counted, known)
    assert wrong == {}


@pytest.mark.parametrize("hub_id", REBUILT)
def test_shipped_description_is_what_building_gives(hub_id):
    built = describe_config(ENTRIES[hub_id]["config"], origin=Path(hub_id))
    assert built == shape_of_document(DESCRIBED[hub_id])


def test_description_says_whose_rotary_frequencies_depend_on_lengths():
    by_length = {name for name, entry in DESCRIBED.items() if entry["rotates_by_length"]}
    assert by_length == {"microsoft/Phi-4-mini-instruct", "microsoft/Phi-3.5-mini-instruct"}


def test_every_shipped_model_is_described_and_every_name_stands_once():
    assert list(DESCRIBED) == list(ENTRIES)
    names = [
        name for hub_id, entry in ENTRIES.items() for name in (hub_id, *entry.get("same_shape", ()))
    ]
    assert len(names) == len(set(names)) == len(known_models())


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-70B", "llama-3.1-70b", "Llama-3.3-70B-Instruct"]
)
def test_model_is_found_with_or_without_owner_in_any_case(name):
    entry = "meta-llama/Llama-3.1-70B"
    assert known_config(name) == ENTRIES[entry]["config"]
    assert known_shape(name) == shape_of_document(DESCRIBED[entry])


def test_unknown_model_has_near_names():
    assert known_config("Qwen2.5-77B") is None
    assert known_shape("Qwen2.5-77B") is None
    assert "Qwen/Qwen2.5-72B" in nearest_models("Qwen2.5-77B")
