"""A config.json with scaled positions is what stock Transformers makes of the same parameters."""

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.families import FAMILIES
from tests.support.refusals import refusal
from workflow.lib.export.extended_model import scaled_context, with_scaling
from workflow.lib.settings.train import RopeScaling

YARN = RopeScaling(rope_type="yarn", factor=4)
SCALED = (
    YARN,
    RopeScaling(rope_type="linear", factor=4),
    RopeScaling(rope_type="llama3", factor=4),
)


def config_of(family, **text):
    config = FAMILIES[family].config(family)
    config.get_text_config().update(text)
    return config.to_dict()


def scaled(family, scaling=YARN, **text):
    """Return the text part of a family's config with scaled positions, as Transformers reads it."""
    document = with_scaling(config_of(family, **text), scaling)
    return AutoConfig.for_model(**document).get_text_config()


@pytest.mark.parametrize("scaling", SCALED, ids=lambda x: x.rope_type)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral3", "qwen3_vl", "glm"])
def test_model_reads_the_settings_and_the_longer_context(family, scaling):
    text = scaled(family, scaling)
    assert text.max_position_embeddings == 512
    assert scaling.parameters.items() <= text.rope_parameters.items()
    if scaling.rope_type != "linear":
        assert text.rope_parameters["original_max_position_embeddings"] == 128
    own = AutoConfig.for_model(**config_of(family)).get_text_config().rope_parameters
    assert own.keys() <= text.rope_parameters.keys()
    assert text.rope_parameters["rope_theta"] == own["rope_theta"]


@pytest.mark.parametrize("scaling", SCALED, ids=lambda x: x.rope_type)
def test_positions_turn_slower_by_the_factor_where_they_turn_slowest(scaling):
    text, plain = (
        scaled("llama", scaling),
        scaled("llama", RopeScaling(rope_type="linear", factor=4)),
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS[scaling.rope_type](text, "cpu")
    slowed, _ = ROPE_INIT_FUNCTIONS["linear"](plain, "cpu")
    assert frequencies[-1] == pytest.approx(slowed[-1].item())


def test_layers_of_a_sliding_window_keep_their_positions():
    own, text = config_of("gemma3_text")["rope_parameters"], scaled("gemma3_text").rope_parameters
    assert text["sliding_attention"] == own["sliding_attention"]
    assert text["full_attention"]["rope_type"] == "yarn"
    assert text["full_attention"]["rope_theta"] == own["full_attention"]["rope_theta"]


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0} | {
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32
}  # fmt: skip
OWN = {
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    | {"original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_factor_is_of_the_context_before_a_models_own_scaling(own):
    scaling = RopeScaling(rope_type="yarn", factor=8)
    text = scaled("llama", scaling, rope_parameters=own)
    assert text.rope_parameters["original_max_position_embeddings"] == 32
    assert text.max_position_embeddings == 256
    assert "low_freq_factor" not in text.rope_parameters
    told = refusal(lambda: scaled("llama", YARN, rope_parameters=own))
    assert "model.rope_scaling.factor = 4.0: 32 tokens x factor must be above" in told
    assert "max_position_embeddings = 128. Set it above 4." in told


def test_older_name_of_the_parameters_is_replaced():
    document = config_of("llama") | {"rope_theta": 5e5}
    del document["rope_parameters"]
    old = document | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    made = with_scaling(old, RopeScaling(rope_type="yarn", factor=4))
    assert "rope_scaling" not in made
    assert made["rope_parameters"]["rope_theta"] == 5e5
    assert made["rope_parameters"]["original_max_position_embeddings"] == 64
    assert scaled_context(old, YARN) == 256


@pytest.mark.parametrize(("family", "reason"), [
    ("jamba", "jamba has rotary positions not of one kind, or none"),
    ("phi3", "phi3 does not take it ("),
    ("gemma4_text", "gemma4_text has rotary positions of a kind of its own (proportional)"),
])  # fmt: skip
def test_other_positions_are_refused(family, reason):
    told = refusal(lambda: with_scaling(config_of(family), YARN))
    assert f"model.rope_scaling.rope_type = 'yarn': {reason}" in told
    assert "Remove model.rope_scaling" in told
