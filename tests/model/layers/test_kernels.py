"""The GPU kernels by Triton's interpreter, where Triton is installed; and what happens where it is
not.

The interpreter cuts off where a GPU rounds to bf16, so values here are fp32; `tests/gpu` has the
rest.
"""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.kernel_cases import ACTIVATIONS, SHAPES
from workflow.lib.model.layers import kernels

DECODED = """
import torch
from tests.support.kernel_cases import SHAPES, decoded
for shape in SHAPES:
    for block_size, double_quant in ((64, True), (64, False), (256, True)):
        weights, expected = decoded(
            shape, block_size=block_size, double_quant=double_quant,
            dtype=torch.float32, device="cpu",
        )
        assert torch.equal(weights, expected), (shape, block_size, double_quant)
"""
DECODED_RUNS = """
import torch
from tests.support.kernel_cases import RUNS, decoded
for runs in RUNS:
    for double_quant in (True, False):
        weights, expected = decoded(
            (1000, 320), block_size=64, double_quant=double_quant,
            dtype=torch.float32, device="cpu", runs=runs,
        )
        assert torch.equal(weights, expected), (runs, double_quant)
"""
ACT_AND_MUL = """
import torch
from tests.support.kernel_cases import ACTIVATIONS, act_and_mul_results
for activation in ACTIVATIONS:
    results = act_and_mul_results(activation, dtype=torch.float32, device="cpu")
    product, again, of_gate, of_up, *expected = results
    torch.testing.assert_close([product, of_gate, of_up], expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(product, again)
"""


ROTARY = """
import torch
from tests.support.kernel_cases import rotations
results = rotations(dtype=torch.float32, device="cpu")
torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-5)
"""
DROPPED = """
import torch
from tests.support.kernel_cases import droppings
results = droppings(dtype=torch.float32, device="cpu")
assert all(map(torch.equal, results[::2], results[1::2]))
"""
LENGTHENED = """
import torch
from tests.support.kernel_cases import ACTIVATIONS, lengthenings
for activation in ACTIVATIONS:
    results = lengthenings(activation, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-4)
"""


SUMMED = """
import torch
from tests.support.kernel_cases import sums_by_token
results = sums_by_token(dtype=torch.float32, device="cpu")
torch.testing.assert_close(results[::2], results[1::2], rtol=1e-6, atol=1e-6)
"""
EIGHT_BITS = """
import torch
from tests.support.eight_bit_cases import FORMATS, int8_products, weights_and_activations
for form in FORMATS.values():
    for one, other in weights_and_activations(form, device="cpu", interpreted=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), form.name
for one, other in int8_products(device="cpu"):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-3)
"""
RESTORED = """
import torch
from tests.support.eight_bit_cases import restored_rows
for one, other in restored_rows(dtype=torch.float32, device="cpu", interpreted=True):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
"""


@pytest.mark.skipif(
    not kernels.INSTALLED, reason="Triton is not installed: PyTorch for CPUs needs none"
)
@pytest.mark.parametrize(
    "claims",
    [DECODED, DECODED_RUNS, ACT_AND_MUL, ROTARY, DROPPED, LENGTHENED, SUMMED, EIGHT_BITS, RESTORED],
    ids=[
        "decoding",
        "decoding of parts",
        "activation and product",
        "rotary positions",
        "dropout",
        "row lengths",
        "sums by token",
        "products in 8 bits",
        "rows of 8 bits",
    ],
)
def test_kernels_compute_what_the_libraries_do(claims: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", claims], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_cpu_does_without_the_kernels() -> None:
    assert not kernels.usable(torch.device("cpu"))


def test_kernels_know_the_activations_of_the_fused_layers() -> None:
    from workflow.lib.model.fused_feed_forward import ACTIVATIONS as FUSED

    assert FUSED.keys() == ACTIVATIONS.keys()
    assert SHAPES
