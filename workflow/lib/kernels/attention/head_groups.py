"""Attention as kernels of forward and backward, of all heads or of some at a time.

FlashAttention 2 sums gradients of queries in fp32, and with grouped heads makes gradients of keys
and values for every head of queries: at 32 heads and 8 of keys four times the queries' bytes. Heads
do not depend on each other, so backward may compute some heads of keys, with their queries, at a
time."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

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
            inputs = (grads[0], query, key, value, output, sums, *others)
            return None, None, *ctx.kernels.backward(*inputs)
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
