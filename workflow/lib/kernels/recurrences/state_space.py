"""The selective state space of Mamba 2 (arXiv 2405.21060) over rows of tokens.

With the state S of a head (width x state width), a token's step d = softplus(dt + bias), decay
exp(A d) with A < 0, input x, and B and C of its group:

    S <- exp(A d) S + d x B^T,   output S C + D x

A chunk of tokens is like causal attention with decaying scores; states between chunks are one
matmul with the decays between chunks.

On a GPU kernels first compute all chunks' additions to a head's state at once. Then programs loop
over the chunks with a part of the state each, and last all chunks' outputs are computed at once.
Backward recomputes the states, then the states' gradients in the same way from the end, then all
others at once. `triton_code.state_space` has the formulas. Nothing here waits for the device."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.kernel_launch import launch
from workflow.lib.kernels.op import Case, Op, Variant, keeping
from workflow.lib.kernels.recurrences.chunks import (
    CHUNK,
    Sizes,
    Tile,
    chunked,
    decays,
    joined,
    like,
    parts_of,
    spaced,
    strides_of,
)

TORCH_CHUNK = 128  # of torch's operations
CASE_TOKENS = TORCH_CHUNK + 2
MOST_STATES = 256  # columns of B and C that the kernels are checked with
STATE_ELEMENTS = 1024  # of a state, in one program
PORTION = 8  # most heads whose gradients of B and C a program sums


TILES = {
    "chunk_states": Tile((128, 64), 4, 2),
    "output": Tile((64, 128), 4, 2),
    "inputs_backward": Tile((64, 64), 4, 2),
    "shared_backward": Tile((64, 64), 4, 2),
}
"""For values of 16 bits, as tried on an H100 with Triton 3.6."""
TILES_FP32 = {
    "chunk_states": Tile((32, 64), 4, 1),
    "output": Tile((32, 64), 4, 1),
    "inputs_backward": Tile((32, 32), 4, 1),
    "shared_backward": Tile((32, 32), 4, 1),
}


class Steps(NamedTuple):
    """The computation of steps from a linear's output. softplus: of dt + bias; limits: bounds of
    the step after that."""

    softplus: bool
    limits: tuple[float, float]

    def made(self, dt: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the steps (rows, tokens, heads) in fp32."""
        value = dt.float() if bias is None else dt.float() + bias.float()
        return (nn.functional.softplus(value) if self.softplus else value).clamp(*self.limits)


def forward(
    x: torch.Tensor,
    dt: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor | None,
    bias: torch.Tensor | None,
    steps: Steps,
) -> torch.Tensor:
    """Return the result of `state_space`, by kernels. States between them have the type of x."""
    step = steps.made(dt, bias).contiguous()
    x, into, out_of = spaced(x), spaced(into), spaced(out_of)
    space = _space(x, into)
    sums = _cumulated(space, x, step, decay)
    states = _passed(space, x, step, into, sums, back=False)
    out = like(x)
    space.launch(
        "output", space.tiles * space.parts("output", "width"), out, x, step, into, out_of,
        decay if skip is None else skip,  # an unread pointer without D
        states, sums, **strides_of(x=x, into=into, out_of=out_of), skips=skip is not None,
    )  # fmt: skip
    return out


def _step_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, of final steps (rows, tokens, heads) fp32, B and C."""
    grad, x, step = spaced(grad), spaced(x), step.contiguous()
    into, out_of = spaced(into), spaced(out_of)
    space = _space(x, into)
    sums = _cumulated(space, x, step, decay)
    states = _passed(space, x, step, into, sums, back=False)
    grad_states = _passed(space, grad, step, out_of, sums, back=True)
    distances = strides_of(grad=grad, x=x, into=into, out_of=out_of)

    grad_x, grad_step = like(x), like(step)
    space.launch(
        "inputs_backward", space.tiles, grad_x, grad_step, grad, x, step, decay, into, out_of,
        decay if skip is None else skip,  # an unread pointer without D
        states, grad_states, sums, **distances, skips=skip is not None,
    )  # fmt: skip
    portions = parts_of(space.share, PORTION)
    grad_into, grad_out_of = (_by_portion(y, portions) for y in (into, out_of))
    num_programs = space.rows * space.chunks * space.groups * portions
    num_programs *= space.parts("shared_backward", "state_width")
    space.launch(
        "shared_backward", num_programs, grad_into, grad_out_of,
        grad, x, step, into, out_of, states, grad_states, sums,
        **distances, portions=portions, portion=parts_of(space.share, portions),
    )  # fmt: skip
    return grad_x, grad_step, _summed(grad_into, into), _summed(grad_out_of, out_of)


def _space(x: torch.Tensor, into: torch.Tensor) -> Sizes:
    rows, tokens, heads, width = x.shape
    groups, state_width = into.shape[2:]
    programs = TILES_FP32 if x.dtype == torch.float32 else TILES
    widths = {"state_width": state_width, "width": width}
    named = ("state_columns", "columns")
    return Sizes("state_space", programs, widths, named, rows, tokens, groups, heads, x.dtype)


def _cumulated(
    space: Sizes, x: torch.Tensor, step: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """Return the sums of log decays in chunks, (tiles, 64) fp32."""
    sums = x.new_empty(space.tiles, CHUNK, dtype=torch.float32)
    sizes = {"tokens": space.tokens, "chunks": space.chunks, "heads": space.heads}
    launch("state_space.cumulate", (space.tiles,), sums, step, decay, **sizes, num_warps=1)
    return sums


def _passed(
    space: Sizes,
    x: torch.Tensor,
    step: torch.Tensor,
    factors: torch.Tensor,
    sums: torch.Tensor,
    *,
    back: bool,
) -> torch.Tensor:
    """Return the states before chunks (tiles, state width, width) for inputs x and B; or `back`
    their gradients after chunks, for the gradient of the output and C."""
    states = x.new_empty(space.tiles, factors.shape[3], x.shape[3])
    num_parts = math.prod(space.parts("chunk_states", side) for side in space.widths)
    space.launch(
        "chunk_states", space.tiles * num_parts, states, x, step, factors, sums,
        **strides_of(x=x, factors=factors), back=back,
    )  # fmt: skip
    elements = math.prod(states.shape[1:])
    num_programs = space.rows * space.heads * parts_of(elements, STATE_ELEMENTS)
    launch(
        "state_space.pass_states", (num_programs,), states, sums, chunks=space.chunks,
        elements=elements, size=STATE_ELEMENTS, back=back, num_warps=4,
    )  # fmt: skip
    return states


def _by_portion(x: torch.Tensor, portions: int) -> torch.Tensor:
    """Return a tensor for the gradients of portions of a group's heads for x (rows, tokens, groups,
    state width): fp32 if they are added afterwards."""
    dtype = x.dtype if portions == 1 else torch.float32
    return x.new_empty(*x.shape[:3], portions, x.shape[3], dtype=dtype)


def _summed(by_portion: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over portions in x's shape and type."""
    if by_portion.shape[3] == 1:
        return by_portion.squeeze(3)
    return by_portion.sum(dim=3).to(x.dtype)


def backward(
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
    """Return the gradients of x, dt, B and C from the output's, by kernels."""
    leaf = dt.detach().requires_grad_()
    with torch.enable_grad():
        step = steps.made(leaf, bias)
    grad_x, grad_step, grad_into, grad_out_of = _step_gradients(
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
    step = chunked(steps.made(dt, dt_bias), TORCH_CHUNK, heads)
    inputs = chunked(x, TORCH_CHUNK, heads)
    into, out_of = (chunked(y, TORCH_CHUNK, (groups, 1)).squeeze(3) for y in (into, out_of))
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
    return not trained and into.shape[3] <= MOST_STATES


def _variant(x: torch.Tensor, dt: torch.Tensor, into: torch.Tensor, *_: Any) -> Variant:
    return x.dtype, x.shape[2] // into.shape[2], x.shape[3], into.shape[3]


state_space = Op(
    "the state space of Mamba 2",
    reference=keeping(7, by_torch),
    kernel=keeping(7, forward, backward),
    case=_case,
    variant=_variant,
    supports=_supports,
)
"""Returns (rows, tokens, heads, width) in the type of x; states begin at zero with each row. x:
(rows, tokens, heads, width). dt: (rows, tokens, heads). into (B), out_of (C): (rows, tokens,
groups, state width), each group serving neighbouring heads. decay (A), skip (D), dt_bias:
(heads,)."""
