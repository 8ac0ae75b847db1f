"""The selective state space of Mamba 2 (arXiv 2405.21060) over rows of tokens.

With the state S of a head (width x state width), a token's step d = softplus(dt + bias), decay
exp(A d) with A < 0, input x, and B and C of its group:

    S <- exp(A d) S + d x B^T,   output S C + D x

A chunk of tokens is like causal attention with decaying scores; states between chunks are one
product with the decays between chunks. On a GPU kernels do so (`space_kernels`).
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.kernels.exact_activations import keep_exact
from workflow.lib.kernels.recurrences import space_kernels
from workflow.lib.kernels.recurrences.chunks import chunked, decays, joined
from workflow.lib.kernels.recurrences.recomputed import recomputed
from workflow.lib.kernels.trials import are_right, gradients_alone
from workflow.lib.system.device_types import RECORDED

CHUNK = 128
TRIED_TOKENS = CHUNK + 2


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
    frozen = not any(y is not None and y.requires_grad for y in (decay, skip, dt_bias))
    steps = Steps(softplus, limits)
    if frozen and _kernels_compute(x, into):
        apply: Callable[..., torch.Tensor] = _ByKernels.apply
        return apply(steps, x, dt, into, out_of, decay, skip, dt_bias)
    return recomputed(partial(by_torch, steps=steps), x, dt, decay, into, out_of, skip, dt_bias)


class Steps(NamedTuple):
    """How steps are made of what a linear gives."""

    softplus: bool
    limits: tuple[float, float]

    def made(self, dt: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the steps (rows, tokens, heads) in fp32."""
        value = dt.float() if bias is None else dt.float() + bias.float()
        return (nn.functional.softplus(value) if self.softplus else value).clamp(*self.limits)


def _kernels_compute(x: torch.Tensor, into: torch.Tensor) -> bool:
    """Return whether the kernels are right on a device, of such inputs."""
    if not kernels.usable(x.device) or into.shape[3] > space_kernels.MOST_STATES:
        return False
    share = x.shape[2] // into.shape[2]
    if x.device.type == RECORDED:
        return True
    return _tried(x.device, x.dtype, share, x.shape[3], into.shape[3])


@functools.cache
@torch.no_grad()
def _tried(
    device: torch.device, dtype: torch.dtype, share: int, width: int, state_width: int
) -> bool:
    """Whether the kernels give what torch's operations give of small values."""
    draw = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 1, TRIED_TOKENS, share, width, generator=draw).to(device, dtype)
    step = torch.rand(1, TRIED_TOKENS, share, generator=draw).to(device)
    into, out_of = torch.randn(2, 1, TRIED_TOKENS, 1, state_width, generator=draw).to(device, dtype)
    decay, skip = torch.rand(2, share, generator=draw).to(device)
    given = (x, step, -decay, into, out_of, skip)

    def made() -> list[torch.Tensor]:
        return [space_kernels.forward(*given), *space_kernels.backward(grad, *given)]

    with gradients_alone():
        leaves = [y.float().requires_grad_() for y in (x, step, into, out_of)]
        inputs, times, of_into, of_out_of = leaves
        steps = Steps(softplus=False, limits=(0.0, float("inf")))
        output = by_torch(inputs, times, -decay, of_into, of_out_of, skip, None, steps=steps)
    expected = [output, *torch.autograd.grad(output, leaves, grad.float())]
    return are_right(made, expected, of="the state space of Mamba 2")


class _ByKernels(torch.autograd.Function):
    """Keeps its inputs alone, which are never rounded."""

    @staticmethod
    def forward(
        ctx: Any,
        steps: Steps,
        x: torch.Tensor,
        dt: torch.Tensor,
        into: torch.Tensor,
        out_of: torch.Tensor,
        decay: torch.Tensor,
        skip: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        keep_exact(x, dt, into, out_of)
        ctx.save_for_backward(x, dt, into, out_of, decay, skip, bias)
        ctx.steps = steps
        return space_kernels.forward(x, steps.made(dt, bias), decay, into, out_of, skip)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, dt, into, out_of, decay, skip, bias = ctx.saved_tensors
        given = dt.detach().requires_grad_()
        with torch.enable_grad():
            step = ctx.steps.made(given, bias)
        of_x, of_step, of_into, of_out_of = space_kernels.backward(
            grads[0], x, step.detach(), decay, into, out_of, skip
        )
        (of_dt,) = torch.autograd.grad(step, given, of_step)
        return None, of_x, of_dt, of_into, of_out_of, None, None, None


def by_torch(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    *,
    steps: Steps,
) -> torch.Tensor:
    """Return what `state_space` does, by torch's operations and with their memory."""
    tokens, groups = into.shape[1:3]
    heads = (groups, x.shape[2] // groups)
    step = chunked(steps.made(dt, dt_bias), CHUNK, heads)
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
