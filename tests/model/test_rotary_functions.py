"""Which functions of families rotate heads, and attention that calls ours in their place. What it
computes, and its gradients: `tests/training/test_families.py`."""

import inspect
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model.test_recurrence_functions import nodes_behind
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.model.tried_classes.rotary_functions import Form, rotary_form, rotate_by_kernel_


def rotated_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def test_a_function_that_rotates_by_a_table_of_two_halves_is_known():
    def rotate(q, k, cos, sin):
        cos, sin = cos[:, None], sin[:, None]
        return q * cos + rotated_half(q) * sin, k * cos + rotated_half(k) * sin

    assert rotary_form(rotate) == Form(tensors=2, axis=1, neighbours=False, table="halves")


def test_a_function_that_does_more_than_rotate_is_not_known():
    def scaled(x, cos, sin):
        return 1.1 * (x * cos[:, None] + rotated_half(x) * sin[:, None])

    assert rotary_form(scaled) is None


def test_a_function_that_rotates_the_last_part_of_heads_is_not_known():
    """Of whole heads it does what ours does, which rotates the first part."""

    def last_part(x, cos, sin):
        rest, x = x.split([x.shape[-1] - cos.shape[-1], cos.shape[-1]], dim=-1)
        return torch.cat((rest, x * cos[:, None] + rotated_half(x) * sin[:, None]), dim=-1)

    assert rotary_form(last_part) is None


def test_a_function_of_whole_heads_is_not_called_for_parts_of_them():
    """Llama's class fails with such a table: so has it to fail with ours."""
    module = attention("llama")
    rotate_by_kernel_(module)
    quarter = torch.randn(1, 5, 4)
    with pytest.raises(RuntimeError):
        module(
            hidden_states=torch.randn(2, 5, 48), position_embeddings=(quarter, quarter),
            attention_mask=None,
        )  # fmt: skip


def attention(family, **changes):
    config = AutoConfig.for_model(
        family, hidden_size=48, intermediate_size=64, num_hidden_layers=2, vocab_size=97,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, pad_token_id=0, **changes,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    return decoder_layers(model)[1].self_attn


def nodes_of_ours(module):
    """How many of the nodes behind the output of a module are our operation's."""
    x = torch.randn(2, 5, 48, requires_grad=True)
    cos, sin = torch.randn(2, 1, 5, 4).repeat(1, 1, 1, 2)
    output = module(hidden_states=x, position_embeddings=(cos, sin), attention_mask=None)
    return nodes_behind(output)["_Rotary"]


def test_the_module_calls_our_operation_and_its_class_does_not():
    ours, stock = attention("olmo3"), attention("olmo3")
    assert rotate_by_kernel_(ours)
    assert nodes_of_ours(ours) == 1
    assert nodes_of_ours(stock) == 0
    assert type(ours).__module__ == type(stock).__module__  # where the check looks for eager


def test_a_function_that_gets_another_kind_of_table_is_the_familys():
    module, stock = attention("olmo3"), attention("olmo3")
    rotate_by_kernel_(module)
    rotating, family = (
        inspect.unwrap(type(each).forward).__globals__["apply_rotary_pos_emb"]
        for each in (module, stock)
    )
    assert rotating is not family
    query, key = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 5, 8)
    angles = torch.randn(2, 2, 1, 5, 8)  # of each head: the family's code multiplies by it
    found = rotating(query, key, angles[0], angles[1], unsqueeze_dim=0)
    torch.testing.assert_close(found, family(query, key, angles[0], angles[1], unsqueeze_dim=0))


def test_attention_without_such_a_function_is_left_alone():
    module = attention("olmo3").o_proj
    assert not rotate_by_kernel_(module)
    assert type(module) is torch.nn.Linear
