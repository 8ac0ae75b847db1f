"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) over rows of tokens.

With the state S of a head (key width x value width), a token's decay exp(g), key k, value v and
learning rate b, and its query q:

    S <- exp(g) (S - b k (k^T S)) + b k v^T,   output S^T q

Within a chunk of tokens all corrections are one triangular system, so that a chunk maps the state
that it gets to the one it leaves by one matrix: S' = M S + N. What runs from chunk to chunk is one
product each; all else is products of all chunks at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from workflow.lib.model.layers.recurrences.chunks import chunked, decays, joined
from workflow.lib.model.layers.recurrences.recomputed import recomputed

CHUNK = 64
NORM_EPS = 1e-6  # of query and key, as in the published models' code


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    normalize: bool,
) -> torch.Tensor:
    """Return (rows, tokens, value heads, value width) in the queries' type; states begin at zero
    with each row. Queries are scaled by one over the root of their width.

    query, key: (rows, tokens, key heads, key width), each serving neighbouring value heads.
    value: (rows, tokens, value heads, value width). g (at most 0), beta: (rows, tokens, value
    heads). normalize: queries and keys to length one.
    """
    return recomputed(partial(_over_rows, normalize=normalize), query, key, value, g, beta)


def _over_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    normalize: bool,
) -> torch.Tensor:
    tokens, groups = key.shape[1:3]
    of_values = (groups, value.shape[2] // groups)
    q, k = (chunked(x, CHUNK, (groups, 1)) for x in (query, key))
    v, log_decay, rate = (chunked(x, CHUNK, of_values) for x in (value, g, beta))
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    sums = log_decay.cumsum(dim=-1)
    between, since, until = decays(sums), sums.exp(), (sums[..., -1:] - sums).exp()
    system = (k @ k.mT) * between * rate[..., None]
    known = torch.cat((v, k * since[..., None]), dim=-1) * rate[..., None]
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    new, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    left = k * until[..., None]
    kept = torch.diag_embed(since[..., -1:].expand(*since.shape[:-1], k.shape[-1]))
    states = states_before(kept - left.mT @ read, left.mT @ new)
    values = new - read @ states
    output = (q * since[..., None]) @ states + ((q @ k.mT) * between) @ values
    return joined(output, tokens, query.dtype)


def states_before(matrices: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return the state before each chunk, where it becomes matrix @ state + added in each.

    matrices: (chunks, ..., width, width); added: (chunks, ..., width, other width). The first
    state is zero.
    """
    apply: Callable[..., torch.Tensor] = _Chain.apply
    return apply(matrices, added)


class _Chain(torch.autograd.Function):
    """One product a chunk in each direction."""

    @staticmethod
    def forward(ctx: Any, matrices: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        by, more = matrices.flatten(1, -3), added.flatten(1, -3)
        states = torch.empty_like(more)
        states[0].zero_()
        for i in range(1, len(states)):
            torch.baddbmm(more[i - 1], by[i - 1], states[i - 1], out=states[i])
        ctx.save_for_backward(by, states)
        ctx.shapes = matrices.shape, added.shape
        return states.view(added.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by, states = ctx.saved_tensors
        of_states = grads[0].reshape(states.shape)
        after = torch.empty_like(states)  # the gradient of the state that each chunk leaves
        after[-1].zero_()
        for i in range(len(states) - 1, 0, -1):
            torch.baddbmm(of_states[i], by[i].mT, after[i], out=after[i - 1])
        of_matrices, of_added = ctx.shapes
        return (after @ states.mT).view(of_matrices), after.view(of_added)
