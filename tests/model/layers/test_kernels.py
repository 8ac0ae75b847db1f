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
        found, expected = decoded(
            shape, block_size=block_size, double_quant=double_quant,
            dtype=torch.float32, device="cpu",
        )
        assert torch.equal(found, expected), (shape, block_size, double_quant)
"""
GATED = """
import torch
from tests.support.kernel_cases import ACTIVATIONS, gated_results
for activation in ACTIVATIONS:
    results = gated_results(activation, dtype=torch.float32, device="cpu")
    product, again, of_gate, of_up, *expected = results
    torch.testing.assert_close([product, of_gate, of_up], expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(product, again)
"""


ROTATED = """
import torch
from tests.support.kernel_cases import rotations
found = rotations(dtype=torch.float32, device="cpu")
torch.testing.assert_close(found[::2], found[1::2], rtol=1e-5, atol=1e-5)
"""


@pytest.mark.skipif(
    not kernels.INSTALLED, reason="Triton is not installed: PyTorch for CPUs needs none"
)
@pytest.mark.parametrize(
    "claims", [DECODED, GATED, ROTATED], ids=["decoding", "gated feed-forward", "rotation"]
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
