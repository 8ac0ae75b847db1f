"""The selective state space of Mamba 2 (arXiv 2405.21060) over rows of tokens.

With the state S of a head (width x state width), a token's step d = softplus(dt + bias), decay
exp(A d) with A < 0, input x, and B and C of its group:

    S <- exp(A d) S + d x B^T,   output S C + D x

A chunk of tokens is like causal attention with decaying scores; states between chunks are one
product with the decays between chunks.
"""

from functools import partial

import torch
from torch import nn

from workflow.lib.model.layers.recurrences.chunks import chunked, decays, joined
from workflow.lib.model.layers.recurrences.recomputed import recomputed

CHUNK = 128


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    softplus: bool,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Return (rows, tokens, heads, width) in the type of x; states begin at zero with each row.

    x: (rows, tokens, heads, width). dt: (rows, tokens, heads). decay (A), skip (D), dt_bias:
    (heads,). into (B), out_of (C): (rows, tokens, groups, state width), each group serving
    neighbouring heads. softplus: of dt, once the bias is added; limits: what the step is clamped to
    after that.
    """
    over_rows = partial(_over_rows, softplus=softplus, limits=limits)
    return recomputed(over_rows, x, dt, decay, into, out_of, skip, dt_bias)


def _over_rows(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    softplus: bool,
    limits: tuple[float, float],
) -> torch.Tensor:
    tokens, groups = into.shape[1:3]
    heads = (groups, x.shape[2] // groups)
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    if softplus:
        steps = nn.functional.softplus(steps)
    step = chunked(steps.clamp(*limits), CHUNK, heads)
    inputs = chunked(x, CHUNK, heads)
    into, out_of = (chunked(y, CHUNK, (groups, 1)).squeeze(3) for y in (into, out_of))
    sums = (step * decay.float().view(*heads, 1)).cumsum(dim=-1)
    given = inputs * step[..., None]
    output = ((out_of @ into.mT)[:, :, :, None] * decays(sums)) @ given
    # The heads of a group have their states side by side: B and C are not repeated for them.
    until = (sums[..., -1:] - sums).exp()
    left = (given * until[..., None]).mT.flatten(3, 4) @ into
    states = _states_before(left.unflatten(3, (heads[1], -1)), sums[..., -1])
    read = (out_of @ states.flatten(3, 4).mT).unflatten(-1, (heads[1], -1)).movedim(-2, 3)
    output = output + read * sums.exp()[..., None]
    if skip is not None:
        output = output + inputs * skip.float().view(*heads, 1, 1)
    return joined(output, tokens, x.dtype)


def _states_before(left: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """Return the state before each chunk. left: what each chunk adds to the state that it leaves,
    (chunks, rows, groups, heads, width, state width). log_decay: of a chunk, without the last two.
    """
    sums = log_decay.movedim(0, -1).cumsum(dim=-1)
    before = nn.functional.pad(sums, (1, -1))
    # Of a state that an earlier chunk left, so much is there before a later one.
    between = before[..., :, None] - sums[..., None, :]
    chunks = between.shape[-1]
    not_yet = torch.ones(chunks, chunks, dtype=torch.bool, device=left.device).triu()
    weights = between.masked_fill(not_yet, float("-inf")).exp()
    return torch.einsum("...zc,c...pn->z...pn", weights, left)
