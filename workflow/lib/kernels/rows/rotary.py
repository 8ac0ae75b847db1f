"""Rotary positions (RoPE, arXiv 2104.09864) of queries and keys by one operation, where families
take ten.

A pair of dimensions (a, b) of a head becomes (a cos - b sin, b cos + a sin). cos and sin here:
(1 or rows, seq_len, pairs), the angle of each pair once; perhaps a part of a family's table. The
dimensions after the pairs' stay as they are. neighbours: dimensions 2 i and 2 i + 1 are a pair,
else i and i + the number of pairs.
"""

from collections.abc import Callable
from typing import Any

import torch

from workflow.lib.kernels import elementwise as kernels

Heads = tuple[torch.Tensor, ...]


def apply_rotary(
    *heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neighbours: bool = False
) -> Heads:
    """Return tensors of heads (rows, seq_len, heads, head_dim), rotated."""
    _check(cos, heads[0])
    rotate: Callable[..., Heads] = _Rotary.apply
    return rotate(cos, sin, neighbours, *heads)


class _Rotary(torch.autograd.Function):
    """Backward turns the other way; nothing is kept but cos and sin, which all layers share."""

    @staticmethod
    def forward(
        ctx: Any, cos: torch.Tensor, sin: torch.Tensor, neighbours: bool, *heads: torch.Tensor
    ) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return tuple(_rotate(x, cos, sin, neighbours=neighbours) for x in heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        turned = (_rotate(x, cos, sin, back=True, neighbours=ctx.neighbours) for x in grads)
        return None, None, None, *turned


def split_rotary(
    heads: torch.Tensor,
    counts: tuple[int, int, int],
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    neighbours: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys, rotated, and values, of all their heads (rows, seq_len, heads,
    head_dim), as tensors of their own: the value of the one linear is kept by none.

    counts: heads of queries, keys and values.
    """
    _check(cos, heads)
    split: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = _SplitRotary.apply
    return split(heads, counts, cos, sin, neighbours)


class _SplitRotary(torch.autograd.Function):
    """As `_Rotary`; backward writes three gradients into one."""

    @staticmethod
    def forward(
        ctx: Any,
        heads: torch.Tensor,
        counts: tuple[int, int, int],
        cos: torch.Tensor,
        sin: torch.Tensor,
        neighbours: bool,
    ) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.counts, ctx.neighbours = counts, neighbours
        *turned, value = heads.split(counts, dim=2)
        query, key = (_rotate(x, cos, sin, neighbours=neighbours) for x in turned)
        return query, key, value.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        rows, seq_len, _, head_dim = grads[0].shape
        of_heads = grads[0].new_empty(rows, seq_len, sum(ctx.counts), head_dim)
        *turned, of_value = of_heads.split(ctx.counts, dim=2)
        for grad, out in zip(grads[:2], turned, strict=True):
            _rotate(grad, cos, sin, back=True, neighbours=ctx.neighbours, out=out)
        of_value.copy_(grads[2])
        return of_heads, None, None, None, None


def _check(cos: torch.Tensor, heads: torch.Tensor) -> None:
    assert 2 * cos.shape[-1] <= heads.shape[-1], "the kernel would write past the head"


def _rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    back: bool = False,
    neighbours: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rotated heads, in `out` if it is given."""
    if kernels.usable(x.device):
        given = x.contiguous() if kernels.token_distance(x) is None else x
        return kernels.apply_rotary(given, cos, sin, back=back, neighbours=neighbours, out=out)
    width = 2 * cos.shape[-1]
    turned, rest = x.split([width, x.shape[-1] - width], dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    if back:
        sin = -sin
    if neighbours:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(parts, dim=-1).flatten(-2) if neighbours else torch.cat(parts, dim=-1)
    heads = torch.cat((turned.to(x.dtype), rest), dim=-1)
    return heads if out is None else out.copy_(heads)
