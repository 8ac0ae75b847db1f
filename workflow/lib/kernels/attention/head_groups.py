"""Attention whose backward computes some heads of keys, with their queries, at a time, and whose
results a recomputed layer may keep.

FlashAttention 2 sums gradients of queries in fp32, and with grouped heads makes gradients of keys
and values for every head of queries: at 32 heads and 8 of keys four times the queries' bytes. Heads
do not depend on each other, so groups of them need a share of it. Forward is torch's own."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import varlen

from workflow.lib.kernels.attention.kept_results import KeptResults

GROUPS = 8  # at most: a group must fill a GPU

Tensors = tuple[torch.Tensor, ...]


class Kernels(NamedTuple):
    """Forward and backward of attention over heads (..., heads at dim 1, ...)."""

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors]
    """Returns output, logarithms of sums, and whatever else `backward` takes."""
    backward: Callable[..., Tensors]
    """Gradients of query, key and value, from the output's and all tensors of forward."""
    sums_dim: int  # of the heads in the logarithms of sums


def by_head_groups(
    kernels: Kernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    groups: int = GROUPS,
    kept: KeptResults | None = None,
) -> torch.Tensor:
    """Return the attention of heads at dim 1; each head of keys serves neighbouring queries. groups
    of heads, at most; kept: has the results of recomputed layers."""
    apply: Callable[..., torch.Tensor] = _ByHeadGroups.apply
    forward = kernels.forward if kept is None else partial(kept.of, kernels.forward)
    return apply(kernels._replace(forward=forward), groups, query, key, value)


class _ByHeadGroups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        groups: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        output, sums, *others = kernels.forward(query, key, value)
        ctx.kernels, ctx.groups = kernels, groups
        ctx.save_for_backward(query, key, value, output, sums, *others)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, sums, *others = ctx.saved_tensors
        if ctx.groups == 1:
            return (
                None,
                None,
                *ctx.kernels.backward(
                    grads[0].contiguous(), query, key, value, output.contiguous(), sums, *others
                ),
            )
        made = [x.new_empty(x.shape) for x in (query, key, value)]
        ratio = query.shape[1] // key.shape[1]
        for start, stop in _groups(key.shape[1], ctx.groups):
            keys, queries = (start, stop - start), (start * ratio, (stop - start) * ratio)
            parts = ctx.kernels.backward(
                grads[0].narrow(1, *queries).contiguous(),
                *(query.narrow(1, *queries), key.narrow(1, *keys), value.narrow(1, *keys)),
                output.narrow(1, *queries).contiguous(),
                sums.narrow(ctx.kernels.sums_dim, *queries),
                *others,
            )
            for whole, part, group in zip(made, parts, (queries, keys, keys), strict=True):
                whole.narrow(1, *group).copy_(part)
            del parts, part  # before the next group
        return None, None, *made


def _groups(heads: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of at most so many groups of heads of keys."""
    size = -(-heads // most)
    for start in range(0, heads, size):
        yield start, min(start + size, heads)


def varlen_kernels(
    bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float | None,
    window: tuple[int, int],
    options: dict[str, Any],
) -> Kernels:
    """Return torch's FlashAttention over packed documents, heads (tokens, heads, head_dim); the
    arguments are `varlen_attn`'s."""
    documents = bounds, key_bounds, longest, longest_key
    causal, kinds = window == (-1, 0), {"scale": scale, "window_size": list(window)}

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
        made: Tensors = varlen._varlen_attn(
            query, key, value, *documents, causal, **kinds, **options
        )
        return made

    def backward(*tensors: torch.Tensor) -> Tensors:
        *inputs, random_state = tensors
        made: Tensors = varlen._varlen_attn_backward(
            *inputs, *documents, causal, random_state, **kinds
        )
        return made

    return Kernels(forward, backward, sums_dim=0)


def cudnn_kernels(scale: float | None, length: int) -> Kernels:
    """Return cuDNN's causal attention within documents of `length` tokens, heads (documents, heads,
    length, head_dim)."""
    return Kernels(
        partial(_cudnn_forward, scale), partial(_cudnn_backward, scale, length), sums_dim=1
    )


def _cudnn_forward(scale: float | None, *heads: torch.Tensor) -> Tensors:
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, is_causal=True, scale=scale
    )
    output, sums, seed, offset = made[0], made[1], made[6], made[7]
    return output, sums, seed, offset


def _cudnn_backward(scale: float | None, length: int, *tensors: torch.Tensor) -> Tensors:
    none = (None, None, None)  # of a bias, and of bounds of documents
    made: Tensors = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *tensors, *none, length, length, 0.0, True, scale=scale
    )
    return made
