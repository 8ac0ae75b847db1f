"""Linears that share their input, called one by one. Their gradients: `test_lora_matmul`, and
of every family `tests/training/test_families.py`."""

import pytest
import torch

from tests.support.adapted_layers import Layer, random
from tests.support.models import nf4_linear
from workflow.lib.model.layers.lora_linear import VALUES, SharedInput
from workflow.lib.model.layers.lora_matmul import nf4_lora_matmuls


class Able(Layer):
    able = True

    def can_share_node(self) -> bool:
        return self.able


@pytest.fixture
def layers(tmp_path):
    """Linears (7, 13) with adapters."""
    bases = (nf4_linear(tmp_path / str(n), random(7, 13, seed=n), bias=None) for n in range(3))
    weights = [(random(3, 13, seed=6 + n), random(7, 3, seed=9 + n)) for n in range(3)]
    return [
        Able(base, *(weight.requires_grad_() for weight in both))
        for base, both in zip(bases, weights, strict=True)
    ]


def test_all_values_are_of_one_node_and_none_is_left(layers):
    x, shared = random(2, 5, 13, seed=8), SharedInput(layers)
    found = [shared.value(layer, x) for layer in layers]
    for value, expected in zip(found, nf4_lora_matmuls(x, layers), strict=True):
        assert value is not None
        assert torch.equal(value, expected)
    assert len({value.grad_fn for value in found if value is not None}) == 1
    assert not getattr(x, VALUES)[0]


def test_an_input_that_has_changed_since_gives_new_values(layers):
    x, shared = random(2, 5, 13, seed=8), SharedInput(layers)
    shared.value(layers[0], x)
    x.add_(1)
    value = shared.value(layers[1], x)
    assert value is not None
    assert torch.equal(value, nf4_lora_matmuls(x, layers)[1])


def test_a_value_is_taken_once(layers):
    x, shared = random(2, 5, 13, seed=8), SharedInput(layers)
    one, other = shared.value(layers[0], x), shared.value(layers[0], x)
    assert one is not None
    assert other is not None
    assert one.data_ptr() != other.data_ptr()


def test_nothing_is_shared_where_one_of_them_computes_otherwise(layers):
    layers[1].able = False
    assert SharedInput(layers).value(layers[0], random(2, 5, 13)) is None
