"""Codes and scales of one weight: against a plain implementation, and where the answer is known."""

import math

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from workflow.lib.kernels.nf4.decode import decoded as decoded_bytes
from workflow.lib.quantization.calibrated_rounding import (
    SHARES,
    column_scales,
    decode,
    error_feedback,
    round_absmax,
    round_calibrated,
    searched_scales,
)
from workflow.lib.quantization.nf4_codes import (
    code_table,
    packed_codes,
    store_scales,
    stored_tensors,
)
from workflow.lib.settings.config import QuantizeConfig

CPU = torch.device("cpu")
SHAPES = [(48, 128), (37, 80), (5, 200), (16, 64)]  # whole blocks in a row, and blocks over rows


def random_weight(shape):
    torch.manual_seed(0)
    return torch.randn(shape) * 0.05


def random_correlation(width, *, inputs=400):
    """Inputs of which some are large and all are mixed, as a model's are."""
    torch.manual_seed(1)
    x = torch.randn(inputs, width) * torch.logspace(0, 1.5, width)
    x = x @ (torch.eye(width) + 0.3 * torch.randn(width, width) / math.sqrt(width))
    return x.T @ x / inputs


def plain_gptq(weight, correlation, scale):
    """GPTQ as its paper states it, in float64, columns with the largest inputs first: after each
    column the inverse correlation of the columns that are left, by elimination. scale: of every
    weight. Returns the decoded weight."""
    table = code_table(CPU).double()
    damping = 0.02 * correlation.diagonal().double().mean()
    inverse = (correlation.double() + damping * torch.eye(len(correlation))).inverse()
    left, result = weight.double().clone(), torch.empty_like(weight, dtype=torch.float64)
    for column in correlation.diagonal().argsort(descending=True).tolist():
        of_column = scale[:, column : column + 1].double()
        codes = (left[:, column : column + 1] - table * of_column).abs().argmin(1)
        result[:, column] = table[codes] * of_column[:, 0]
        lost = (left[:, column] - result[:, column]) / inverse[column, column]
        left -= torch.outer(lost, inverse[column])
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return result


def weighted_error(weight, approximation, correlation):
    """The squared norm of what is wrong in the outputs: tr(D H D^T)."""
    difference = weight - approximation
    return float((difference @ correlation * difference).sum())


def all_scales(rounded, *, block_size):
    shape = rounded.codes.shape
    columns = torch.arange(shape[1])
    return column_scales(rounded.scales.decoded, shape, columns, block_size=block_size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [64, 128])
def test_codes_are_those_of_a_plain_implementation(shape, block_size):
    weight, correlation = random_weight(shape), random_correlation(shape[1])
    settings = QuantizeConfig(block_size=block_size)
    rounded = round_calibrated(weight, error_feedback(correlation, what="w"), settings)
    scale = all_scales(rounded, block_size=block_size)
    expected = plain_gptq(weight, correlation, scale)
    ours = decode(rounded, block_size=block_size).double()
    # A value in the middle of two codes may go either way in float32, and its row with it.
    alike = torch.isclose(ours, expected, rtol=1e-5, atol=1e-7).all(1)
    assert alike.float().mean() > 0.9
    theirs = weighted_error(weight.double(), expected, correlation.double())
    found = weighted_error(weight.double(), ours, correlation.double())
    assert found < 1.01 * theirs
    plain = decode(round_absmax(weight, settings), block_size=block_size).double()
    assert found < weighted_error(weight.double(), plain, correlation.double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("double_quant", [True, False])
def test_uncorrelated_inputs_give_searched_scales_and_nearest_codes(shape, double_quant):
    weight, settings = random_weight(shape), QuantizeConfig(double_quant=double_quant)
    rounded = round_calibrated(weight, error_feedback(torch.eye(shape[1]), what="w"), settings)
    searched = searched_scales(weight, torch.ones(shape[1]), block_size=64)
    scales = store_scales(searched, double_quant=double_quant)
    assert torch.equal(rounded.scales.stored, scales.stored)
    scale = all_scales(rounded, block_size=64)
    values = code_table(CPU) * scale.unsqueeze(-1)
    nearest = (weight.unsqueeze(-1) - values).abs().min(-1).values
    ours = (weight - decode(rounded, block_size=64)).abs()
    torch.testing.assert_close(ours, nearest, rtol=0, atol=1e-7)


def test_scale_of_a_block_is_the_best_of_all_shares():
    weight, importance = random_weight((7, 64)), torch.rand(64)
    scales = searched_scales(weight, importance, block_size=64)
    table, largest = code_table(CPU), weight.abs().amax(1)

    def error(row, scale):
        nearest = (weight[row, :, None] - table * scale).abs().min(-1).values
        return float((nearest.square() * importance).sum())

    for row in range(7):
        assert scales[row] in [share * largest[row] for share in SHARES]
        errors = [error(row, share * largest[row]) for share in SHARES]
        assert error(row, scales[row]) == pytest.approx(min(errors), rel=1e-5)
    assert (scales < largest).any(), "clipping should pay somewhere"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("double_quant", [True, False])
def test_stored_bytes_are_those_of_bitsandbytes(shape, double_quant):
    weight, settings = random_weight(shape), QuantizeConfig(double_quant=double_quant)
    parts = packed(round_absmax(weight, settings), settings, shape)
    bytes_of, state = quantize_4bit(
        weight, blocksize=64, compress_statistics=double_quant, quant_type="nf4"
    )
    theirs = {"weight": bytes_of} | {
        f"weight.{key}": value for key, value in state.as_dict(packed=True).items()
    }
    assert parts.keys() == theirs.keys()
    for name, part in theirs.items():
        assert torch.equal(parts[name], part), name


@pytest.mark.parametrize("shape", [(48, 128), (16, 64)], ids=str)
@pytest.mark.parametrize("double_quant", [True, False])
def test_bitsandbytes_decodes_the_calibrated_weight_bit_by_bit(shape, double_quant):
    weight, settings = random_weight(shape), QuantizeConfig(double_quant=double_quant)
    feedback = error_feedback(random_correlation(shape[1]), what="w")
    rounded = round_calibrated(weight, feedback, settings)
    _, state = quantize_4bit(
        weight, blocksize=64, compress_statistics=double_quant, quant_type="nf4"
    )
    state.absmax, state.offset, state.state2 = (
        rounded.scales.stored, rounded.scales.offset, rounded.scales.nested,
    )  # fmt: skip
    stored = packed(rounded, settings, shape)["weight"]
    assert torch.equal(dequantize_4bit(stored, state), decode(rounded, block_size=64))
    assert torch.equal(decoded_bytes(stored, state), decode(rounded, block_size=64))


def packed(rounded, settings, shape):
    codes = packed_codes(rounded.codes.reshape(-1))
    return stored_tensors(codes, rounded.scales, settings, shape=shape, dtype=torch.float32)


def test_inputs_that_are_always_zero_leave_their_columns_alone():
    correlation = random_correlation(64)
    correlation[[3, 17]] = 0
    correlation[:, [3, 17]] = 0
    weight, settings = random_weight((9, 64)), QuantizeConfig(double_quant=False)
    rounded = round_calibrated(weight, error_feedback(correlation, what="w"), settings)
    scale = rounded.scales.decoded[:, None, None]
    nearest = (weight[:, [3, 17], None] - code_table(CPU) * scale).abs().min(-1).values
    ours = (weight - decode(rounded, block_size=64)).abs()[:, [3, 17]]
    torch.testing.assert_close(ours, nearest, rtol=0, atol=1e-6)


def test_fewer_inputs_than_columns_are_enough():
    """The correlation is singular: damping makes it invertible."""
    correlation = random_correlation(128, inputs=20)
    feedback = error_feedback(correlation, what="w")
    assert feedback.factor.isfinite().all()
    identity = feedback.factor.double().T @ feedback.factor.double()
    ordered = correlation.double()[feedback.order][:, feedback.order]
    damped = ordered + 0.02 * correlation.diagonal().mean() * torch.eye(128)
    torch.testing.assert_close(identity @ damped, torch.eye(128).double(), rtol=0, atol=1e-2)


def test_more_damping_is_told(caplog):
    """Not positive definite by 5% of its mean: 2% does not suffice in any type."""
    correlation = torch.eye(8)
    correlation[0, 0] = -0.05
    feedback = error_feedback(correlation, what="layers.3.mlp.up_proj")
    assert feedback.factor.isfinite().all()
    assert "layers.3.mlp.up_proj" in caplog.text
    assert "0.1 of its diagonal's mean" in caplog.text


def test_zero_weights_stay_zero():
    weight, settings = torch.zeros(4, 64), QuantizeConfig(double_quant=False)
    rounded = round_calibrated(weight, error_feedback(random_correlation(64), what="w"), settings)
    assert not decode(rounded, block_size=64).any()
