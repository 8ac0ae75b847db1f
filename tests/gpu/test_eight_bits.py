"""Matmuls in 8 bits on a GPU against the CPU's, bit by bit where nothing is summed."""

import pytest
import torch

from tests.support.adapted_layers import Layer, random
from tests.support.eight_bit_cases import float8_matmul, weights_and_activations
from tests.support.models import nf4_linear, plain_linear
from workflow.lib.kernels.nf4.decode import dequantize_nf4
from workflow.lib.model.layers.frozen_linear import MatmulPrecision
from workflow.lib.model.layers.lora_matmul import nf4_lora_matmuls

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("float8")]


@pytest.fixture
def float8():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no matmuls in float8")
    assert dequantize_nf4.works_on(torch.device("cuda", 0), torch.bfloat16)


def test_weights_and_activations_are_the_cpu_s_bit_by_bit():
    for one, other in weights_and_activations(device="cuda", interpreted=False):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_products_are_the_cpu_s():
    """Rounded to bf16, and of sums of fewer bits (fast accumulation)."""
    one, other = float8_matmul(device="cuda")
    largest = float(other.abs().max())
    torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-8 * largest)


@pytest.mark.parametrize("quantized", [True, False], ids=["NF4", "16 bits"])
def test_node_has_the_values_and_gradients_of_the_cpu(tmp_path, quantized):
    """In bf16: a few roundings of 2^-9 of the largest."""
    results = []
    for device in ("cpu", "cuda"):
        types = MatmulPrecision(forward=True, backward=True)
        make = nf4_linear if quantized else plain_linear
        base = make(tmp_path / device, random(160, 256)).to(device)
        base.matmul_precision = types
        weights = random(4, 256, seed=6).to(device), random(160, 4, seed=8).to(device)
        layer = Layer(base, *(weight.requires_grad_() for weight in weights))
        x = random(48, 256, seed=2).to(device, torch.bfloat16).requires_grad_()
        grad = random(48, 160, seed=3).to(device, torch.bfloat16)
        with types.in_eight_bits():
            (y,) = nf4_lora_matmuls(x, [layer])
            found = (y, *torch.autograd.grad(y, (x, *layer.weights), grad))
        results.append([tensor.detach().float().cpu() for tensor in found])
    for one, other in zip(*results, strict=True):
        largest = float(one.abs().max())
        torch.testing.assert_close(other, one, rtol=0, atol=2**-6 * largest)
