"""Rotary positions of fused attention. Its gradients and families: `tests/training`."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.fuse_layers import fuse_layers_
from workflow.lib.model.fused_attention import FusedAttention, apply_rotary, split_rotary
from workflow.lib.model.layers import kernels


def test_tables_in_float32_leave_queries_in_their_type() -> None:
    """Ernie 4.5 keeps its tables in full precision."""
    query, key = torch.randn(2, 5, 3, 8).bfloat16(), torch.randn(2, 5, 1, 8).bfloat16()
    angles = torch.randn(1, 5, 4).repeat(1, 1, 2)
    found = apply_rotary(query, key, angles.cos(), angles.sin())
    assert [x.dtype for x in found] == [torch.bfloat16] * 2
    exact = apply_rotary(query.float(), key.float(), angles.cos(), angles.sin())
    torch.testing.assert_close(found, tuple(x.bfloat16() for x in exact), rtol=0, atol=0)


@pytest.mark.parametrize("neighbours", [False, True])
def test_heads_of_one_linear_are_turned_like_those_of_three(neighbours: bool) -> None:
    """Six of eight dimensions; gradients come back as one, of which values have a part, too."""
    heads = torch.randn(2, 5, 7, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(1, 5, 3, dtype=torch.float64).repeat(1, 1, 2)
    turns = angles.cos(), angles.sin()
    query, key, value = heads.split((3, 2, 2), dim=2)
    expected = (*apply_rotary(query, key, *turns, neighbours=neighbours), value)
    found = split_rotary(heads, (3, 2, 2), *turns, neighbours=neighbours)
    grads = [torch.randn_like(x) for x in expected]
    gradients = [torch.autograd.grad(made, heads, grads)[0] for made in (found, expected)]
    assert all(map(torch.equal, found, expected))
    assert torch.equal(*gradients)
    assert all(x.untyped_storage().nbytes() == x.numel() * 8 for x in found)


def phi(**changes: Any) -> torch.nn.Module:
    """Return the attention of a tiny Phi-3, of which 3 heads share a key head, fused if it can
    be.
    """
    config = AutoConfig.for_model(
        "phi3", hidden_size=48, intermediate_size=64, num_hidden_layers=1, vocab_size=97,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, pad_token_id=0, **changes,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    fuse_layers_(model)
    return decoder_layers(model)[0].self_attn  # type: ignore[return-value]


def rope(share: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_one_linear_of_queries_keys_and_values_is_fused(share: float) -> None:
    """Phi-4-mini rotates three quarters of each head."""
    assert isinstance(phi(rope_parameters=rope(share)), FusedAttention)


def test_attention_that_drops_scores_is_left_alone() -> None:
    assert not isinstance(phi(attention_dropout=0.1), FusedAttention)


def test_tokens_of_some_heads_lie_at_equal_distances() -> None:
    heads = torch.zeros(2, 5, 7, 8)
    assert kernels.token_distance(heads) == kernels.token_distance(heads[:, :, 1:3]) == 56
    assert kernels.token_distance(heads[:, :, :, :4]) is None
    assert kernels.token_distance(heads[:, ::2]) is None
    # One head between dimensions that were exchanged is contiguous for torch, whatever its strides.
    assert kernels.token_distance(torch.zeros(2, 1, 5, 8).transpose(1, 2)) == 8
    assert kernels.token_distance(torch.zeros(2, 7, 1, 8).transpose(1, 2)) == 56
