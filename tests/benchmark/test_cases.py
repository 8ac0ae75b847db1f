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
