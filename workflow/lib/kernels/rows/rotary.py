"""Rotary positions (RoPE, arXiv 2104.09864) of queries and keys by one operation, where families
use ten.

A pair of dimensions (a, b) of a head becomes (a cos - b sin, b cos + a sin). cos and sin here: (1
or rows, seq_len, pairs), the angle of each pair once, possibly a part of a family's table.
Dimensions after the pairs' do not change. neighbours: dimensions 2 i and 2 i + 1 are a pair, else i
and i + the number of pairs."""

from collections.abc import Callable
from typing import Any

import torch

from workflow.lib.kernels.kernel_launch import WARPS, launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn

Heads = tuple[torch.Tensor, ...]


def apply_rotary(
    *heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neighbours: bool = False
) -> Heads:
    """Return tensors of heads (rows, seq_len, heads, head_dim), rotated."""
    _check(cos, heads[0])
    apply: Callable[..., Heads] = _Rotary.apply
    return apply(cos, sin, neighbours, *heads)


class _Rotary(torch.autograd.Function):
    """Backward rotates the other way; only cos and sin, which all layers share, are kept."""

    @staticmethod
    def forward(
        ctx: Any, cos: torch.Tensor, sin: torch.Tensor, neighbours: bool, *heads: torch.Tensor
    ) -> Heads:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return tuple(rotate(x, cos, sin, False, neighbours) for x in heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        turned = (rotate(x, cos, sin, True, ctx.neighbours) for x in grads)
        return None, None, None, *turned


def _check(cos: torch.Tensor, heads: torch.Tensor) -> None:
    assert 2 * cos.shape[-1] <= heads.shape[-1], "the kernel would write past the head"


def _by_kernel(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool, neighbours: bool
) -> torch.Tensor:
    x = x.contiguous() if _token_distance(x) is None else x
    out = x.new_empty(x.shape)
    distances = _token_distance(x), _token_distance(out)
    rows, seq_len, heads, head_dim = x.shape
    pairs = cos.shape[-1]
    cos, sin = (_with_one_distance(angles) for angles in (cos, sin))
    assert cos.stride() == sin.stride(), "the kernel knows one distance for both"
    launch(
        "elementwise.apply_rotary", (rows * seq_len,), out, x, cos, sin,
        cos.shape[0] * cos.shape[1], *cos.stride()[1:], heads, head_dim, *distances,
        back=back, pairs=pairs, neighbours=neighbours,
        heads=power_of_two(heads), width=power_of_two(pairs),
        unrotated=power_of_two(head_dim - 2 * pairs) if head_dim > 2 * pairs else 0,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def _with_one_distance(angles: torch.Tensor) -> torch.Tensor:
    """Return angles (rows, seq_len, pairs) whose tokens lie at equal distances."""
    rows, seq_len, _ = angles.shape
    row_stride, token_stride, _ = angles.stride()
    return angles if rows == 1 or row_stride == seq_len * token_stride else angles.contiguous()


def _token_distance(x: torch.Tensor) -> int | None:
    """Return the elements between the starts of two tokens of x (rows, seq_len, heads, head_dim),
    if they are equal and heads are contiguous; else None."""
    rows, seq_len, heads, head_dim = x.shape
    row_stride, token_stride, head_stride, dim_stride = x.stride()
    distance = token_stride if seq_len > 1 else row_stride
    alike = rows == 1 or seq_len == 1 or row_stride == seq_len * token_stride
    return (
        distance if alike and dim_stride == 1 and (heads == 1 or head_stride == head_dim) else None
    )


def _by_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool, neighbours: bool
) -> torch.Tensor:
    width = 2 * cos.shape[-1]
    turned, unrotated = x.split([width, x.shape[-1] - width], dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    if back:
        sin = -sin
    if neighbours:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(parts, dim=-1).flatten(-2) if neighbours else torch.cat(parts, dim=-1)
    return torch.cat((turned.to(x.dtype), unrotated), dim=-1)


def _case(device: torch.device, dtype: torch.dtype, neighbours: bool) -> Case:
    return *drawn(device, dtype, (2, 7, 3, 24), (1, 7, 10), (1, 7, 10)), False, neighbours


rotate = Op(
    "rotary positions",
    reference=_by_torch,
    kernel=_by_kernel,
    case=_case,
    variant=lambda x, *args: (x.dtype, args[3]),
)
"""Returns x (rows, seq_len, heads, head_dim), rotated or turned `back`."""
