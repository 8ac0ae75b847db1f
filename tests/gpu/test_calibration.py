"""The compiled kernel that rounds columns against PyTorch's loop, bit by bit."""

import pytest
import torch

from tests.support.rounding_cases import columns
from workflow.lib.model.layers import kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(4096, 128), (1001, 128), (9, 40), (4, 1)], ids=str)
def test_kernel_rounds_as_the_loop_does(one_gpu: int, shape: tuple[int, int]) -> None:
    assert kernels.usable(torch.device("cuda"))
    kernel, loop = columns(shape, device="cuda")
    for ours, expected in zip(kernel, loop, strict=True):
        assert torch.equal(ours, expected)
