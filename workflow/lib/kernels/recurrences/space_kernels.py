"""The selective state space of Mamba 2 over rows of tokens and its gradients, by GPU kernels: the
result of `state_space` for final steps.

First all chunks' additions to a head's state are computed at once. Then programs loop over the
chunks with a part of the state each, and last all chunks' outputs are computed at once. Backward
recomputes the states, then the states' gradients in the same way from the end, then all others at
once. `triton_code.state_space` has the formulas. Nothing here waits for the device."""

from typing import Any, NamedTuple

import torch

from workflow.lib.kernels.launch import launch
from workflow.lib.kernels.recurrences.chunks import CHUNK, padded, parts_of, spaced, strides_of

MOST_STATES = 256  # columns of B and C that the kernels are checked with
STATE_ELEMENTS = 1024  # of a state, in one program
PORTION = 8  # most heads whose gradients of B and C a program sums


class Tile(NamedTuple):
    """The size of a kernel's program."""

    state_columns: int  # most columns of B and C at a time
    columns: int  # most columns of inputs at a time
    warps: int
    stages: int


TILES = {
    "chunk_states": Tile(128, 64, 4, 2),
    "output": Tile(64, 128, 4, 2),
    "inputs_backward": Tile(64, 64, 4, 2),
    "shared_backward": Tile(64, 64, 4, 2),
}
"""For values of 16 bits, as tried on an H100 with Triton 3.6."""
TILES_FP32 = {
    "chunk_states": Tile(32, 64, 4, 1),
    "output": Tile(32, 64, 4, 1),
    "inputs_backward": Tile(32, 32, 4, 1),
    "shared_backward": Tile(32, 32, 4, 1),
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
    space = _Space.of(x, into)
    sums = space.cumulated(x, step, decay)
    states = space.passed(x, step, into, sums, back=False)
    out = _like(x)
    space.launch(
        "output", space.tiles * space.parts("output"), out, x, step, into, out_of,
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
    """Return the gradients of x, step, B and C, contiguous, for that of the output."""
    grad, x, step = spaced(grad), spaced(x), step.contiguous()
    into, out_of = spaced(into), spaced(out_of)
    space = _Space.of(x, into)
    sums = space.cumulated(x, step, decay)
    states = space.passed(x, step, into, sums, back=False)
    of_states = space.passed(grad, step, out_of, sums, back=True)
    distances = strides_of(grad=grad, x=x, into=into, out_of=out_of)

    of_x, of_step = _like(x), _like(step)
    space.launch(
        "inputs_backward", space.tiles, of_x, of_step, grad, x, step, decay, into, out_of,
        decay if skip is None else skip,  # an unread pointer without D
        states, of_states, sums, **distances, skips=skip is not None,
    )  # fmt: skip
    portions = parts_of(space.share, PORTION)
    of_into, of_out_of = (_by_portion(y, portions) for y in (into, out_of))
    num_programs = (
        space.rows * space.chunks * space.groups * portions
        * space.state_parts("shared_backward")
    )  # fmt: skip
    space.launch(
        "shared_backward", num_programs, of_into, of_out_of,
        grad, x, step, into, out_of, states, of_states, sums,
        **distances, portions=portions, portion=parts_of(space.share, portions),
    )  # fmt: skip
    return of_x, of_step, _summed(of_into, into), _summed(of_out_of, out_of)


class _Space(NamedTuple):
    """The sizes of one call."""

    rows: int
    tokens: int
    groups: int
    heads: int
    width: int
    state_width: int
    dtype: torch.dtype  # of the inputs

    @classmethod
    def of(cls, x: torch.Tensor, into: torch.Tensor) -> "_Space":
        rows, tokens, heads, width = x.shape
        groups, state_width = into.shape[2:]
        return cls(rows, tokens, groups, heads, width, state_width, x.dtype)

    @property
    def chunks(self) -> int:
        """Of a row; the last may have fewer tokens."""
        return parts_of(self.tokens, CHUNK)

    @property
    def tiles(self) -> int:
        """Chunks of all heads."""
        return self.rows * self.heads * self.chunks

    @property
    def share(self) -> int:
        return self.heads // self.groups

    def tile(self, name: str) -> Tile:
        return (TILES_FP32 if self.dtype == torch.float32 else TILES)[name]

    def columns(self, name: str) -> dict[str, int]:
        """Return a kernel's columns of inputs, and of B and C, at a time."""
        tile = self.tile(name)
        return {
            "columns": min(tile.columns, padded(self.width, self.dtype)),
            "state_columns": min(tile.state_columns, padded(self.state_width, self.dtype)),
        }

    def parts(self, name: str) -> int:
        """Return how many programs of a kernel share the width."""
        return parts_of(self.width, self.columns(name)["columns"])

    def state_parts(self, name: str) -> int:
        """Return how many programs of a kernel share the state width."""
        return parts_of(self.state_width, self.columns(name)["state_columns"])

    def launch(
        self, name: str, num_programs: int, out: torch.Tensor, *given: torch.Tensor, **options: Any
    ) -> None:
        """Start a kernel that writes to `out`: most multiply a chunk by states twice."""
        tile = self.tile(name)
        launch(
            f"state_space.{name}", (num_programs,), out, *given, tokens=self.tokens,
            chunks=self.chunks, heads=self.heads, share=self.share, width=self.width,
            state_width=self.state_width, **self.columns(name),
            precision="ieee" if self.dtype == torch.float32 else "tf32", num_warps=tile.warps,
            num_stages=tile.stages, **options,
            flop=4.0 * self.tiles * CHUNK * self.width * self.state_width,
        )  # fmt: skip

    def cumulated(self, x: torch.Tensor, step: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        """Return the sums of log decays in chunks, (tiles, 64) fp32."""
        sums = x.new_empty(self.tiles, CHUNK, dtype=torch.float32)
        sizes = {"tokens": self.tokens, "chunks": self.chunks, "heads": self.heads}
        launch("state_space.cumulate", (self.tiles,), sums, step, decay, **sizes, num_warps=1)
        return sums

    def passed(
        self,
        x: torch.Tensor,
        step: torch.Tensor,
        factors: torch.Tensor,
        sums: torch.Tensor,
        *,
        back: bool,
    ) -> torch.Tensor:
        """Return the states before chunks (tiles, state width, width) for inputs x and B; or `back`
        their gradients after chunks, for the gradient of the output and C."""
        states = x.new_empty(self.tiles, self.state_width, self.width)
        num_parts = self.parts("chunk_states") * self.state_parts("chunk_states")
        self.launch(
            "chunk_states", self.tiles * num_parts, states, x, step, factors, sums,
            **strides_of(x=x, factors=factors), back=back,
        )  # fmt: skip
        elements = self.state_width * self.width
        num_programs = self.rows * self.heads * parts_of(elements, STATE_ELEMENTS)
        launch(
            "state_space.pass_states", (num_programs,), states, sums, chunks=self.chunks,
            elements=elements, size=STATE_ELEMENTS, back=back, num_warps=4,
        )  # fmt: skip
        return states


def _like(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of x's shape and type."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


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
