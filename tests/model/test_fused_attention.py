"""Rotary positions of fused attention. Its gradients and families: `tests/training`."""

import torch

from workflow.lib.model.fused_attention import apply_rotary


def test_tables_in_float32_leave_queries_in_their_type() -> None:
    """Ernie 4.5 keeps its tables in full precision."""
    query, key = torch.randn(2, 5, 3, 8).bfloat16(), torch.randn(2, 5, 1, 8).bfloat16()
    angles = torch.randn(1, 5, 4).repeat(1, 1, 2)
    found = apply_rotary(query, key, angles.cos(), angles.sin())
    assert [x.dtype for x in found] == [torch.bfloat16] * 2
    exact = apply_rotary(query.float(), key.float(), angles.cos(), angles.sin())
    torch.testing.assert_close(found, tuple(x.bfloat16() for x in exact), rtol=0, atol=0)
