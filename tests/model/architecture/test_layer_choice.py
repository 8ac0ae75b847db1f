"""Which layers a lever takes when it takes some of them."""

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.lib.model.architecture.layer_choice import (
    is_recomputed,
    recomputed_layers,
    recomputed_share,
)


@pytest.mark.parametrize("every", [3, 7, 49])
def test_a_number_means_every_so_manyth_layer(every):
    """Also where the share has no exact floating-point number: 49 * (1 / 49) < 1."""
    assert recomputed_layers(every, 200) == [*range(0, 200, every)]


@given(share=st.floats(0.001, 0.999), num_layers=st.integers(1, 130))
def test_share_of_the_layers_is_as_named_and_spread_evenly(share, num_layers):
    layers = recomputed_layers(share, num_layers)
    exact = Fraction(str(share)) * num_layers
    assert exact <= len(layers) < exact + 1
    gaps = {after - before for before, after in pairwise(layers)}
    assert len(gaps) <= 2
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert layers[0] == 0
    assert all(is_recomputed(share, layer) == (layer in layers) for layer in range(num_layers))


def test_share_is_the_decimal_number_that_was_written():
    assert recomputed_share(0.1) == Fraction(1, 10)
