"""The shape that a case of the benchmark measures."""

import pytest

from workflow.lib.benchmark.cases import model_config
from workflow.lib.settings.benchmark import BenchmarkConfig

LAYERS, VOCABULARY = 3, 1009


@pytest.mark.parametrize("model", ["google/gemma-2-27b", "google/gemma-3-12b-pt"])
def test_layers_and_vocabulary_of_a_case_are_those_of_its_decoder(model: str) -> None:
    config = model_config(BenchmarkConfig(model=model, layers=LAYERS, vocab_size=VOCABULARY))
    assert (config["num_hidden_layers"], config["vocab_size"]) == (LAYERS, VOCABULARY)
    # The shipped config of Gemma 3 is that of a model with a vision tower.
    assert "text_config" not in config


@pytest.mark.parametrize(
    ("model", "key", "first"),
    [
        ("google/gemma-4-31B", "layer_types", ["sliding_attention"] * LAYERS),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16", "hybrid_override_pattern", "MEM"),
    ],
)
def test_kinds_of_a_case_are_those_of_its_first_layers(model: str, key: str, first: object) -> None:
    assert model_config(BenchmarkConfig(model=model, layers=LAYERS))[key] == first
    assert len(model_config(BenchmarkConfig(model=model))[key]) > LAYERS
