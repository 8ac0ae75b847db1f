"""The selective state space of Mamba 2 (arXiv 2405.21060) over rows of tokens.

With the state S of a head (width x state width), a token's step d = softplus(dt + bias), decay
exp(A d) with A < 0, input x, and B and C of its group:

    S <- exp(A d) S + d x B^T,   output S C + D x

A chunk of tokens is like causal attention with decaying scores; states between chunks are one
matmul with the decays between chunks. On a GPU kernels do so (`space_kernels`)."""

from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.op import Case, Op, Variant, keeping
from workflow.lib.kernels.recurrences import space_kernels
from workflow.lib.kernels.recurrences.chunks import chunked, decays, joined

CHUNK = 128
CASE_TOKENS = CHUNK + 2


class Steps(NamedTuple):
    """The computation of steps from a linear's output. softplus: of dt + bias; limits: bounds of
    the step after that."""

    softplus: bool
    limits: tuple[float, float]

    def made(self, dt: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the steps (rows, tokens, heads) in fp32."""
        value = dt.float() if bias is None else dt.float() + bias.float()
        return (nn.functional.softplus(value) if self.softplus else value).clamp(*self.limits)


def _forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor | None,
    bias: torch.Tensor | None,
    steps: Steps,
) -> torch.Tensor:
    return space_kernels.forward(x, steps.made(dt, bias), decay, into, out_of, skip)


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor | None,
    bias: torch.Tensor | None,
    steps: Steps,
) -> list[torch.Tensor]:
    leaf = dt.detach().requires_grad_()
    with torch.enable_grad():
        step = steps.made(leaf, bias)
    grad_x, grad_step, grad_into, grad_out_of = space_kernels.backward(
        grad, x, step.detach(), decay, into, out_of, skip
    )
    (grad_dt,) = torch.autograd.grad(step, leaf, grad_step)
    return [grad_x, grad_dt, grad_into, grad_out_of]


def by_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    steps: Steps,
) -> torch.Tensor:
    """Return the result of `state_space`, by torch's operations and with their memory."""
    tokens, groups = into.shape[1:3]
    heads = (groups, x.shape[2] // groups)
    step = chunked(steps.made(dt, dt_bias), CHUNK, heads)
    inputs = chunked(x, CHUNK, heads)
    into, out_of = (chunked(y, CHUNK, (groups, 1)).squeeze(3) for y in (into, out_of))
    sums = (step * decay.float().view(*heads, 1)).cumsum(dim=-1)
    weighted_inputs = inputs * step[..., None]
    output = ((out_of @ into.mT)[:, :, :, None] * decays(sums)) @ weighted_inputs
    # A group's heads have their states side by side: B and C are not repeated for them.
    until = (sums[..., -1:] - sums).exp()
    left = (weighted_inputs * until[..., None]).mT.flatten(3, 4) @ into
    states = _states_before(left.unflatten(3, (heads[1], -1)), sums[..., -1])
    read = (out_of @ states.flatten(3, 4).mT).unflatten(-1, (heads[1], -1)).movedim(-2, 3)
    output = output + read * sums.exp()[..., None]
    if skip is not None:
        output = output + inputs * skip.float().view(*heads, 1, 1)
    return joined(output, tokens, x.dtype)


def _states_before(left: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    """Return the state before each chunk. left: each chunk's addition to the state after it,
    (chunks, rows, groups, heads, width, state width). log_decay: of a chunk, without the last
    two."""
    sums = log_decay.movedim(0, -1).cumsum(dim=-1)
    before = nn.functional.pad(sums, (1, -1))
    # The share of an earlier chunk's state that remains before a later one.
    between = before[..., :, None] - sums[..., None, :]
    chunks = between.shape[-1]
    not_yet = torch.ones(chunks, chunks, dtype=torch.bool, device=left.device).triu()
    weights = between.masked_fill(not_yet, float("-inf")).exp()
    return torch.einsum("...zc,c...pn->z...pn", weights, left)


def _case(
    device: torch.device, dtype: torch.dtype, share: int, width: int, state_width: int
) -> Case:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, CASE_TOKENS, share, width, generator=draw).to(device, dtype)
    step = torch.rand(1, CASE_TOKENS, share, generator=draw).to(device)
    into, out_of = torch.randn(2, 1, CASE_TOKENS, 1, state_width, generator=draw).to(device, dtype)
    decay, skip = torch.rand(2, share, generator=draw).to(device)
    leaves = (y.detach().requires_grad_() for y in (x, step, into, out_of))
    return *leaves, -decay, skip, None, Steps(softplus=False, limits=(0.0, float("inf")))


def _supports(*arguments: Any) -> bool:
    """The kernels compute no gradients of decay, skip and bias."""
    _, _, into, _, *head_inputs, _ = arguments
    trained = any(y is not None and y.requires_grad for y in head_inputs)
    return not trained and into.shape[3] <= space_kernels.MOST_STATES


def _variant(x: torch.Tensor, dt: torch.Tensor, into: torch.Tensor, *_: Any) -> Variant:
    return x.dtype, x.shape[2] // into.shape[2], x.shape[3], into.shape[3]


state_space = Op(
    "the state space of Mamba 2",
    reference=keeping(7, by_torch),
    kernel=keeping(7, _forward, _backward),
    case=_case,
    variant=_variant,
    supports=_supports,
)
"""Returns (rows, tokens, heads, width) in the type of x; states begin at zero with each row. x:
(rows, tokens, heads, width). dt: (rows, tokens, heads). into (B), out_of (C): (rows, tokens,
groups, state width), each group serving neighbouring heads. decay (A), skip (D), dt_bias:
(heads,)."""
