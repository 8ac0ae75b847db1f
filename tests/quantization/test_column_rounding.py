"""The kernel that rounds columns, by Triton's interpreter, where Triton is installed."""

import os
import subprocess
import sys

import pytest

from workflow.lib.kernels import elementwise as kernels

# 128 columns, and the last ones of a weight; rows that are no whole programs; scales of 0.
SAME = """
import torch
from tests.support.rounding_cases import SHAPES, columns
for shape in SHAPES:
    kernel, loop = columns(shape, device="cpu")
    for name, ours, expected in zip(("codes", "errors"), kernel, loop, strict=True):
        assert torch.equal(ours, expected), (shape, name)
    assert len(loop[0].unique()) == (16 if shape[1] > 1 else 4), shape
"""


@pytest.mark.skipif(not kernels.INSTALLED, reason="Triton is not installed")
def test_kernel_rounds_as_the_loop_does_bit_by_bit() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", SAME], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
