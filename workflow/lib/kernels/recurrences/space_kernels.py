"""The selective state space of Mamba 2 over rows of tokens and its gradients, by GPU kernels: the
result of `state_space` for final steps.

First all chunks' additions to a head's state are computed at once. Then programs loop over the
chunks with a part of the state each, and last all chunks' outputs are computed at once. Backward
recomputes the states, then the states' gradients in the same way from the end, then all others at
once. `triton_code.state_space` has the formulas. Nothing here waits for the device."""

import math

import torch

from workflow.lib.kernels.kernel_launch import launch
from workflow.lib.kernels.recurrences.chunks import (
    CHUNK,
    Sizes,
    Tile,
    like,
    parts_of,
    spaced,
    strides_of,
)

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


def forward(
    x: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    """Return (rows, tokens, heads, width) in x's type; states begin at zero with each row. x:
    (rows, tokens, heads, width). step: (rows, tokens, heads) fp32, none negative. decay (A),
    negative, and skip (D): (heads,). into (B), out_of (C): (rows, tokens, groups, state width),
    each group serving neighbouring heads. States between the kernels have the type of x."""
    x, step, into, out_of = spaced(x), step.contiguous(), spaced(into), spaced(out_of)
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


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    decay: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, step, B and C, contiguous, from the output's."""
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
