"""The compiled kernels against bitsandbytes, bit by bit, and against autograd."""

import pytest
import torch

from tests.kernel_cases import ACTIVATIONS, SHAPES, decoded, gated_results, rotations
from workflow.lib import kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def usable() -> None:
    """Needs a GPU and Triton: a machine of ours without them is set up wrongly."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    assert kernels.usable(torch.device("cuda", 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("block_size", "double_quant"), [(64, True), (64, False), (256, True)])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 8192)], ids=str)
def test_decoding_equals_bitsandbytes_bit_by_bit(
    shape: tuple[int, int], block_size: int, double_quant: bool, dtype: torch.dtype
) -> None:
    found, expected = decoded(
        shape, block_size=block_size, double_quant=double_quant, dtype=dtype, device="cuda"
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_feed_forward_equals_autograd(activation: str) -> None:
    product, again, of_gate, of_up, *expected = gated_results(activation, dtype=torch.bfloat16, device="cuda")  # fmt: skip
    found = [x.float() for x in (product, of_gate, of_up)]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(product, again)


def test_rotation_equals_its_definition_and_turns_back() -> None:
    found = [x.float() for x in rotations(dtype=torch.bfloat16, device="cuda")]
    torch.testing.assert_close(found[::2], found[1::2], rtol=2e-2, atol=2e-2)
