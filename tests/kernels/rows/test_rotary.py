"""Rotary positions of heads."""

from typing import Any

import pytest
import torch

from workflow.lib.kernels.rows import rotary
from workflow.lib.kernels.rows.rotary import apply_rotary, split_rotary


def test_tables_in_float32_leave_queries_in_their_type():
    """Ernie 4.5 keeps its tables in full precision."""
    query, key = torch.randn(2, 5, 3, 8).bfloat16(), torch.randn(2, 5, 1, 8).bfloat16()
    angles = torch.randn(1, 5, 4)
    turns = {"cos": angles.cos(), "sin": angles.sin()}
    found = apply_rotary(query, key, **turns)
    assert [x.dtype for x in found] == [torch.bfloat16] * 2
    exact = apply_rotary(query.float(), key.float(), **turns)
    torch.testing.assert_close(found, tuple(x.bfloat16() for x in exact), rtol=0, atol=0)


@pytest.mark.parametrize("neighbours", [False, True])
def test_heads_of_one_linear_are_turned_like_those_of_three(neighbours):
    """Six of eight dimensions; gradients come back as one, of which values have a part, too."""
    heads = torch.randn(2, 5, 7, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(1, 5, 3, dtype=torch.float64)
    turns: dict[str, Any] = {"cos": angles.cos(), "sin": angles.sin(), "neighbours": neighbours}
    query, key, value = heads.split((3, 2, 2), dim=2)
    expected = (*apply_rotary(query, key, **turns), value)
    found = split_rotary(heads, (3, 2, 2), **turns)
    grads = [torch.randn_like(x) for x in expected]
    gradients = [torch.autograd.grad(made, heads, grads)[0] for made in (found, expected)]
    assert all(map(torch.equal, found, expected))
    assert torch.equal(*gradients)
    assert all(x.untyped_storage().nbytes() == x.numel() * 8 for x in found)


def test_tokens_of_some_heads_lie_at_equal_distances():
    heads = torch.zeros(2, 5, 7, 8)
    assert rotary._token_distance(heads) == rotary._token_distance(heads[:, :, 1:3]) == 56
    assert rotary._token_distance(heads[:, :, :, :4]) is None
    assert rotary._token_distance(heads[:, ::2]) is None
    # One head between dimensions that were exchanged is contiguous for torch, whatever its strides.
    assert rotary._token_distance(torch.zeros(2, 1, 5, 8).transpose(1, 2)) == 8
    assert rotary._token_distance(torch.zeros(2, 7, 1, 8).transpose(1, 2)) == 56
