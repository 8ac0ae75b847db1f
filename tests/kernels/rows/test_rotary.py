"""Rotary positions of heads."""

import torch

from workflow.lib.kernels.rows import rotary
from workflow.lib.kernels.rows.rotary import apply_rotary


def test_tables_in_float32_leave_queries_in_their_type():
    """Ernie 4.5 keeps its tables in full precision."""
    query, key = torch.randn(2, 5, 3, 8).bfloat16(), torch.randn(2, 5, 1, 8).bfloat16()
    angles = torch.randn(1, 5, 4)
    turns = {"cos": angles.cos(), "sin": angles.sin()}
    found = apply_rotary(query, key, **turns)
    assert [x.dtype for x in found] == [torch.bfloat16] * 2
    exact = apply_rotary(query.float(), key.float(), **turns)
    torch.testing.assert_close(found, tuple(x.bfloat16() for x in exact), rtol=0, atol=0)


def test_tokens_of_some_heads_lie_at_equal_distances():
    heads = torch.zeros(2, 5, 7, 8)
    assert rotary._token_distance(heads) == rotary._token_distance(heads[:, :, 1:3]) == 56
    assert rotary._token_distance(heads[:, :, :, :4]) is None
    assert rotary._token_distance(heads[:, ::2]) is None
    # One head between dimensions that were exchanged is contiguous for torch, whatever its strides.
    assert rotary._token_distance(torch.zeros(2, 1, 5, 8).transpose(1, 2)) == 8
    assert rotary._token_distance(torch.zeros(2, 7, 1, 8).transpose(1, 2)) == 56
