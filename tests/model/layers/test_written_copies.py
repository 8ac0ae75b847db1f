"""Who is given the copy in 8 bits that was written beside a tensor; the kernels that write copies
are tested with the others (`test_kernels`, `tests/gpu`)."""

import pytest

from tests.support.adapted_layers import random
from workflow.lib.kernels.eight_bits.rounding import FORMATS, rounded
from workflow.lib.model.layers.frozen_matmul import ProductTypes
from workflow.lib.model.layers.written_copies import Maker, note, taken_copy

FLOAT8 = FORMATS["float8"]


@pytest.fixture
def types():
    return ProductTypes("float8", "float8")


def made(maker):
    tensor = random(3, 32)
    copy = rounded(tensor, FLOAT8)
    note(tensor, maker, copy)
    return tensor, copy


def test_copy_is_taken_once(types):
    tensor, copy = made(Maker())
    with types.in_eight_bits():
        assert taken_copy(tensor, types) is copy
        assert taken_copy(tensor, types) is None


def test_copy_of_a_tensor_that_has_changed_is_not_taken(types):
    tensor, _ = made(Maker())
    tensor.add_(1)
    with types.in_eight_bits():
        assert taken_copy(tensor, types) is None


def test_view_has_no_copy(types):
    """Its rows may be others."""
    tensor, _ = made(Maker())
    with types.in_eight_bits():
        assert taken_copy(tensor[:2], types) is None


def test_copy_in_another_format_is_not_taken(types):
    others = ProductTypes()
    others.asked = [FORMATS["float8"]._replace(largest=57344.0), None]
    with types.in_eight_bits(), others.in_eight_bits():
        assert taken_copy(made(Maker())[0], others) is None
    assert taken_copy(made(Maker())[0], types) is None, "these multiply in the compute dtype now"


def test_maker_writes_nothing_before_a_product_has_taken_what_it_made(types):
    """And nothing where there is no kernel: the matmuls round by themselves then."""
    maker = Maker()
    assert maker.new_copy(random(3, 32)) is None
    tensor, _ = made(maker)
    taken_copy(tensor, types)
    assert maker.takers is types
    with types.in_eight_bits():
        assert maker.new_copy(random(3, 32)) is None
