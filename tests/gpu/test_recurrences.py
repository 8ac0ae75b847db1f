"""Recurrent layers' operations on a GPU: the compiled kernels against autograd."""

import pytest
import torch

from tests.support.recurrence_cases import deltas, largest_error, spaces
from workflow.lib.kernels.recurrences.gated_delta_rule import gated_delta_rule

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_run")]


# Of 16 bits, what lies between the kernels is rounded, too.
BOUNDS = {torch.bfloat16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("rule", [deltas, spaces])
def test_recurrence_equals_autograds(rule, dtype):
    assert largest_error(rule(dtype=dtype, device="cuda")) < BOUNDS[dtype]


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
        output = gated_delta_rule(*leaves, True)
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
