"""Which attention is fused. Its gradients and families: `tests/training`."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.fusion.fuse_layers import fuse_layers_
from workflow.lib.model.fusion.fused_attention import FusedAttention


def phi(**changes):
    """Return the attention of a tiny Phi-3, of which 3 heads share a key head, fused if it can
    be."""
    config = AutoConfig.for_model(
        "phi3", hidden_size=48, intermediate_size=64, num_hidden_layers=1, vocab_size=97,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, pad_token_id=0, **changes,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    fuse_layers_(model)
    return decoder_layers(model)[0].self_attn  # type: ignore[return-value]


def rope(share):
    return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_one_linear_of_queries_keys_and_values_is_fused(share):
    """Phi-4-mini rotates three quarters of each head."""
    assert isinstance(phi(rope_parameters=rope(share)), FusedAttention)


def test_attention_that_drops_scores_is_left_alone():
    assert not isinstance(phi(attention_dropout=0.1), FusedAttention)
