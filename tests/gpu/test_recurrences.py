"""Recurrent layers' operations on a GPU: the compiled kernels against autograd."""

import pytest
import torch

from tests.support.recurrence_cases import convolutions
from workflow.lib.model.layers import kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def usable() -> None:
    """Needs a GPU and Triton: a machine of ours without them is set up wrongly."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    assert kernels.usable(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_short_convolutions_are_rounded_once(dtype: torch.dtype) -> None:
    results = convolutions(dtype=dtype, device="cuda")
    expected = [exact.to(dtype) for exact in results[1::2]]
    torch.testing.assert_close(results[::2], expected, rtol=2**-7, atol=1e-5)
