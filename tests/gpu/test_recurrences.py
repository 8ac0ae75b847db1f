"""Recurrent layers' operations on a GPU: the compiled kernels against autograd."""

import pytest
import torch

from tests.support.recurrence_cases import convolutions, deltas, gated_norms, largest_error, spaces
from workflow.lib.kernels.recurrences.gated_delta_rule import gated_delta_rule

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_run")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_short_convolutions_are_rounded_once(dtype):
    results = convolutions(dtype=dtype, device="cuda")
    expected = [exact.to(dtype) for exact in results[1::2]]
    torch.testing.assert_close(results[::2], expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gated_norms_are_rounded_once(dtype):
    """Gradients of the row of zeros are hundreds of times the others where the gate comes first."""
    results = gated_norms(dtype=dtype, device="cuda")
    expected = [exact.to(dtype) for exact in results[1::2]]
    torch.testing.assert_close(results[::2], expected, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.bfloat16, 0.02), (torch.float16, 0.005), (torch.float32, 1e-4)],
    ids=str,
)
def test_delta_rule_equals_autograds(dtype, bound):
    """Of 16 bits, what lies between the kernels is rounded, too."""
    assert largest_error(deltas(dtype=dtype, device="cuda")) < bound


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.bfloat16, 0.02), (torch.float16, 0.005), (torch.float32, 1e-4)],
    ids=str,
)
def test_state_space_equals_autograds(dtype, bound):
    """As above."""
    assert largest_error(spaces(dtype=dtype, device="cuda")) < bound


def test_delta_rule_is_captured_as_a_graph():
    """And replayed with other values."""
    draw = torch.Generator(device="cuda").manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=draw, device="cuda").bfloat16()

    key_shape, value_shape, scalars = (2, 150, 2, 32), (2, 150, 4, 64), (2, 150, 4)
    given = [drawn(*key_shape), drawn(*key_shape), drawn(*value_shape)]
    given += [-drawn(*scalars).float().abs(), drawn(*scalars).sigmoid()]
    leaves = [x.requires_grad_() for x in given]

    def step():
        output = gated_delta_rule(*leaves, normalize=True)
        return output, *torch.autograd.grad(output, leaves, torch.ones_like(output))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[2].copy_(drawn(*value_shape))
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert torch.equal(one, other)
