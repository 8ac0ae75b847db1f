"""Weights and activations in 8 bits, and their matmuls, as a CPU computes them; `tests/gpu` and
Triton's interpreter (`test_kernels`) hold the kernels against these."""

import pytest
import torch

from tests.support.adapted_layers import random
from tests.support.models import nf4_linear
from workflow.lib.kernels.eight_bits.matmul import (
    LARGEST,
    RoundedWeight,
    decoded,
    eight_bit_matmul,
    rounded,
    row_scales,
)

OUT, IN = 48, 192  # three blocks a row
# A float8 has 3 bits of mantissa, so a value is off by 1/16 of itself; below 2^-6 by 2^-10.
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-10


@pytest.fixture(params=[True, False], ids=["double", "single"])
def linear(request, tmp_path):
    weight = random(OUT, IN) * torch.logspace(-2, 1, OUT)[:, None]
    weight[5] = 0
    return nf4_linear(tmp_path / "base", weight, double_quant=request.param)


def weight_of(linear):
    data, shape = linear.stored(), linear.spec.shape
    scales = row_scales(data, shape)
    return RoundedWeight(decoded(data, scales, shape), scales)


def bits(tensor):
    return tensor.view(torch.uint8)


def test_weight_in_8_bits_is_the_nf4_weight_rounded_once(linear):
    """bitsandbytes decodes what is compared with."""
    values, scales = weight_of(linear)
    assert scales is not None
    exact = linear.dequantize(torch.float32) / scales[:, None]
    assert float(exact.abs().max()) <= LARGEST * (1 + 1e-6)
    bound = RELATIVE * exact.abs() + ABSOLUTE
    assert ((values.float() - exact).abs() <= bound * (1 + 1e-5)).all()


def test_scale_of_a_row_is_its_largest_weight_over_the_largest_value(linear):
    """By absmax the largest weight of a block has the code 1 or -1."""
    data, shape = linear.stored(), linear.spec.shape
    scales = row_scales(data, shape)
    largest = linear.dequantize(torch.float32).abs().amax(dim=1)
    used = torch.arange(OUT) != 5  # of a row of zeros the scale may be anything small
    torch.testing.assert_close(scales[used] * LARGEST, largest[used], rtol=1e-6, atol=0.0)
    assert float(scales[5]) > 0


def test_transposed_weight_is_the_same(linear):
    values, scales = weight_of(linear)
    assert scales is not None
    turned = decoded(linear.stored(), scales, linear.spec.shape, transposed=True)
    assert turned.is_contiguous()
    assert torch.equal(bits(turned), bits(values.t().contiguous()))


def test_rows_are_rounded_by_their_own_scales():
    rows, factors = random(7, IN, seed=1) * torch.logspace(-5, 5, 7)[:, None], random(IN).abs()
    copy = rounded(rows, factors=factors)
    assert copy.scales.shape == (7, 1)
    exact = rows * factors / copy.scales
    assert (copy.values.float().abs().amax(dim=1) == LARGEST).all()
    bound = RELATIVE * exact.abs() + ABSOLUTE
    assert ((copy.values.float() - exact).abs() <= bound * (1 + 1e-5)).all()


def test_product_is_that_of_what_was_rounded(linear):
    """In fp64, from values times scales; fp32 sums of 192 terms are off by 1e-6 of the largest."""
    weight = weight_of(linear)
    assert weight.scales is not None
    copy = rounded(random(7, IN, seed=1))
    scaled = copy.values.double() * copy.scales.double()
    expected = scaled @ (weight.values.double() * weight.scales.double()[:, None]).t()
    y = eight_bit_matmul(copy, weight, dtype=torch.float32)
    largest = float(expected.abs().max())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_row_that_is_not_finite_stays_so_and_alone(linear, value):
    rows = random(4, IN, seed=1)
    rows[2, 7] = value
    y = eight_bit_matmul(rounded(rows), weight_of(linear), dtype=torch.float32)
    others = [0, 1, 3]
    assert not y[2][torch.arange(OUT) != 5].isfinite().any()
    rows[2] = 0.0  # as many rows as before: a CPU may sum other numbers of rows in another order
    clean = eight_bit_matmul(rounded(rows), weight_of(linear), dtype=torch.float32)
    assert torch.equal(y[others], clean[others])


def test_row_of_zeros_gives_zeros(linear):
    rows = random(3, IN, seed=1)
    rows[1] = 0
    y = eight_bit_matmul(rounded(rows), weight_of(linear), dtype=torch.float32)
    assert (y[1] == 0).all()
    assert (y[:, 5] == 0).all()
    assert (y[0] != 0).sum() >= OUT - 2
