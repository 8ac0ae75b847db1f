"""Matmuls of low rank, the adapters' parts, added by the kernel that reads the values; the gate of
a feed-forward, act(gate) * up, and its gradients, whose kernels add these parts to gate and up.
Gradients of a weight's rows with their own lengths (DoRA, arXiv 2402.09353): of values, which are
directions times `factor` (width,) fp32, and of the factors.

A matmul with a frozen weight in 8 bits cannot accumulate, so an adapter's part would need a pass of
its own over the value: for a feed-forward's wide values as much memory traffic as all later
operations."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from workflow.lib.kernels.kernel_launch import WARPS, launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn

# A program's tiles: the fastest of 16 tried on an H200, rank 16.
TILES = {"rows": 16, "columns": 128, "steps": 8}
CHUNK = 32  # of a rank, that is multiplied at a time
# Kernels read a wide part again for each tile: gates of rank 256 took 7.5 times those of rank 16
# (8B, H200, profiled 2026-11-30). From about 45 on a matmul of its own is faster.
WIDEST_PART = 48
# Tiles that are read ahead, where a rank has few bytes: else they exceed 99 KiB of shared memory.
STAGES, STAGED_BYTES = 3, 64


class LowRank(NamedTuple):
    """An adapter's part of a value: scale * low @ small."""

    low: torch.Tensor  # (T, r), its rows contiguous
    small: torch.Tensor  # (r, out)
    scale: float

    @property
    def rank(self) -> int:
        return self.low.shape[1]


def no_part(value: torch.Tensor) -> LowRank:
    """Return a part of rank 0, which adds nothing to `value` (T, width)."""
    return LowRank(value[:, :0], value[:0], 0.0)


def launch_with_parts(
    kernel: str,
    out: torch.Tensor,
    *others: torch.Tensor | float,
    parts: list[LowRank],
    **options: Any,
) -> None:
    """Start a kernel on tiles of `out` (T, width), contiguous; others: more such, and numbers."""
    num_rows, width = out.shape
    arguments: list[Any] = []
    for low, small, scale in parts:
        assert low.stride(1) == 1, "the kernel reads rows of low one after the other"
        arguments += [low, small, scale, low.stride(0), *small.stride()]
    rank = max(part.rank for part in parts)
    grid = (-(-num_rows // (TILES["rows"] * TILES["steps"])) * -(-width // TILES["columns"]),)
    launch(
        kernel, grid, out, *others, *arguments, num_rows, width, **TILES, **options,
        chunk=min(CHUNK, max(16, power_of_two(rank))), num_warps=WARPS,
        stages=STAGES if rank * out.element_size() <= STAGED_BYTES else 1,
    )  # fmt: skip


def _add_by_kernel_(
    total: torch.Tensor, part: LowRank, other: torch.Tensor | None = None
) -> torch.Tensor:
    launch_with_parts(
        "low_rank.add_low_rank", total, total if other is None else other, parts=[part],
        rank=part.rank, adds_other=other is not None,
    )  # fmt: skip
    increment_version((total,))
    return total


def add_by_torch_(
    total: torch.Tensor, part: LowRank, other: torch.Tensor | None = None
) -> torch.Tensor:
    """Add scale * low @ small, and `other`, to `total` (T, features) in place."""
    if other is not None:
        total.add_(other)
    return total.addmm_(part.low, part.small, alpha=part.scale)


def case_values(
    device: torch.device, dtype: torch.dtype, *, values: int, parts: int
) -> tuple[list[torch.Tensor], list[LowRank]]:
    """Return so many values (5, 40) of a case, and so many parts of such."""
    made = drawn(device, dtype, *[(5, 40)] * values, *[(5, 3), (3, 40)] * parts)
    pairs = zip(made[values::2], made[values + 1 :: 2], strict=True)
    return made[:values], [LowRank(low, small, 0.3) for low, small in pairs]


def _case_of_sum(device: torch.device, dtype: torch.dtype) -> Case:
    (total, other), (part,) = case_values(device, dtype, values=2, parts=1)
    return total, part, other


add_low_rank_ = Op(
    "adapters' parts",
    reference=add_by_torch_,
    kernel=_add_by_kernel_,
    case=_case_of_sum,
    supports=lambda _, part, *__: part.rank <= WIDEST_PART,
)
"""Adds the part, and `other` if there is one, to `total` (T, width); returns it."""


def _silu_parts(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up from the gradient of silu(gate) * up, which is
    overwritten."""
    grad_up = nn.functional.silu(gate).mul_(grad)
    return torch.ops.aten.silu_backward(grad.mul_(up), gate), grad_up


def _gelu_tanh(gate: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(gate, approximate="tanh")


def _gelu_tanh_parts(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_up = _gelu_tanh(gate).mul_(grad)
    return torch.ops.aten.gelu_backward(grad.mul_(up), gate, approximate="tanh"), grad_up


Gates = tuple[torch.Tensor, torch.Tensor]
ACTIVATIONS: dict[
    str,
    tuple[
        Callable[[torch.Tensor], torch.Tensor],
        Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Gates],
    ],
] = {"silu": (nn.functional.silu, _silu_parts), "gelu_tanh": (_gelu_tanh, _gelu_tanh_parts)}
"""The kernels' activations, and their gradients."""


class Gating(NamedTuple):
    """act(multiplier * gate) * up, for an activation of `ACTIVATIONS`."""

    activation: str
    multiplier: float = 1.0

    def multiplied(self, gate: torch.Tensor) -> torch.Tensor:
        return gate if self.multiplier == 1.0 else gate * self.multiplier

    def activated(self, gate: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.activation][0](self.multiplied(gate))

    def gradients(
        self, grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the product, and the gradients of gate and up for `grad`, which is overwritten."""
        product = self.activated(gate).mul_(up)
        grad_gate, grad_up = ACTIVATIONS[self.activation][1](grad, self.multiplied(gate), up)
        return product, self.multiplied(grad_gate), grad_up


def row_distance(gate: torch.Tensor, up: torch.Tensor) -> int:
    """Return the elements between the starts of two rows."""
    assert gate.stride() == up.stride(), "the kernel knows one distance of rows for both"
    assert gate.stride(1) == 1, "the kernel reads columns one after the other"
    return gate.stride(0)


def _gated_by_kernel(
    gate: torch.Tensor, up: torch.Tensor, gate_part: LowRank, up_part: LowRank, gating: Gating
) -> torch.Tensor:
    product = gate.new_empty(gate.shape)
    launch_with_parts(
        "low_rank.act_and_mul", product, gate, up, row_distance(gate, up), gating.multiplier,
        parts=[gate_part, up_part],
        gate_rank=gate_part.rank, up_rank=up_part.rank, kind=gating.activation,
    )  # fmt: skip
    return product


def _gated_by_torch(
    gate: torch.Tensor, up: torch.Tensor, gate_part: LowRank, up_part: LowRank, gating: Gating
) -> torch.Tensor:
    return gating.activated(_with_part(gate, gate_part)).mul_(_with_part(up, up_part))


def _with_part(value: torch.Tensor, part: LowRank) -> torch.Tensor:
    return add_by_torch_(value.clone(), part) if part.rank else value


def _case_of_gate(device: torch.device, dtype: torch.dtype, activation: str) -> Case:
    gates, parts = case_values(device, dtype, values=2, parts=2)
    return *gates, *parts, Gating(activation, 0.7)


Parts = tuple[LowRank, LowRank, LowRank]


def _gradients_by_kernel_(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, parts: Parts, gating: Gating
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gate_part, up_part, grad_part = parts
    launch_with_parts(
        "low_rank.act_and_mul_backward", grad, gate, up, row_distance(gate, up), gating.multiplier,
        parts=[*parts],
        gate_rank=gate_part.rank, up_rank=up_part.rank, grad_rank=grad_part.rank,
        kind=gating.activation,
    )  # fmt: skip
    # Autograd does not see Triton's writes. With a new version it refuses a second backward,
    # which would read the gradients in `gate` and `up` as forward's saved tensors.
    increment_version((grad, gate, up))
    return grad, gate, up


def _gradients_by_torch_(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, parts: Parts, gating: Gating
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    whole = (_with_part(x, part) for x, part in zip((gate, up, grad), parts, strict=True))
    lower, upper, slope = whole
    product, grad_gate, grad_up = gating.gradients(slope, lower, upper)
    return grad.copy_(product), gate.copy_(grad_gate), up.copy_(grad_up)


def _case_of_gradients(device: torch.device, dtype: torch.dtype, activation: str) -> Case:
    values, parts = case_values(device, dtype, values=3, parts=3)
    return *values, tuple(parts), Gating(activation, 0.7)


act_and_mul_backward_ = Op(
    "gradients of gates",
    reference=_gradients_by_torch_,
    kernel=_gradients_by_kernel_,
    case=_case_of_gradients,
    variant=lambda grad, *args: (grad.dtype, args[-1].activation),
)
"""In place, for `grad`, the gradient of `act_and_mul`: `gate` and `up` become their gradients,
`grad` the product; returns the three. parts: still to be added to gate, up, grad."""
act_and_mul = Op(
    "gates of feed-forwards",
    reference=_gated_by_torch,
    kernel=_gated_by_kernel,
    case=_case_of_gate,
    variant=lambda gate, *args: (gate.dtype, args[-1].activation),
    backward=act_and_mul_backward_,
)
"""Returns `gating` (T, f) of gate and up with their parts; rows at one distance."""


SUMMED = {"rows": 64, "columns": 256}  # of a program that sums over rows
GRADIENT_CHUNKS = 8  # of rows, one fp32 matmul each, summed for a factor's gradient


def summed_products(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum over tokens of grad times y (..., out), in fp32."""
    total = torch.zeros(y.shape[-1], device=y.device)
    rows = (x.flatten(0, -2).chunk(GRADIENT_CHUNKS) for x in (grad, y))
    for factor_rows, part in zip(*rows, strict=True):
        total += factor_rows.to(torch.float32, copy=True).mul_(part).sum(dim=0)
    return total


SCALED_COLUMNS = 2048  # of a program that scales part of a row


def _lengthened_by_kernel(
    out: torch.Tensor, direction: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    width = out.shape[-1]
    columns = min(SCALED_COLUMNS, power_of_two(width))
    rows, directions = (x.view(-1, width) for x in (out, direction))
    assert rows.stride(1) == directions.stride(1) == 1, "the kernel reads columns one by one"
    launch(
        "elementwise.lengthen", (len(rows), -(-width // columns)), rows, directions, factor,
        rows.stride(0), directions.stride(0), width, columns=columns, num_warps=WARPS,
    )  # fmt: skip
    return out


def _lengthened_by_torch(
    out: torch.Tensor, direction: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    return torch.mul(direction, factor, out=out)


def _case_of_values(device: torch.device, dtype: torch.dtype) -> Case:
    direction, factor, _ = _drawn(1, device, dtype)
    return torch.empty_like(direction), direction, factor


lengthen = Op(
    "row lengths",
    reference=_lengthened_by_torch,
    kernel=_lengthened_by_kernel,
    case=_case_of_values,
    exact=True,
)
"""Fills `out` with direction (..., width) times factor; returns it, which may be `direction`. torch
needs three times as long for values of 16 bits (Llama 3.2 1B, H200, profiled 2026-11-30)."""


def _by_kernel(
    grad: torch.Tensor, y: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad = grad.contiguous()
    width = y.shape[-1]
    num_rows = y.numel() // width
    grid = (-(-width // SUMMED["columns"]), -(-num_rows // SUMMED["rows"]))
    sums = torch.empty((grid[1], width), dtype=torch.float32, device=y.device)
    scaled = torch.empty_like(grad)
    launch(
        "elementwise.lengthen_backward", grid, sums, scaled, grad, y, factor, num_rows, width,
        **SUMMED, num_warps=WARPS,
    )  # fmt: skip
    return scaled, sums.sum(dim=0)


def _by_torch(
    grad: torch.Tensor, y: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = summed_products(grad, y)
    return torch.mul(grad, factor, out=torch.empty_like(grad)), sums


def _drawn(count: int, device: torch.device, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Return `count` tensors of values, and two factors."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(count, 5, 40, generator=draw).to(device, dtype)
    factors = torch.rand(2, 40, generator=draw).to(device) + 0.5
    return [*(x.clone() for x in values), *factors]


def _case(device: torch.device, dtype: torch.dtype) -> Case:
    grad, y, factor, _ = _drawn(2, device, dtype)
    return grad, y, factor


lengthen_backward = Op(
    "gradients of row lengths", reference=_by_torch, kernel=_by_kernel, case=_case
)
"""Returns grad times the factor, and the sum over rows of grad times y (..., width)."""


def _lengthened_gate_by_kernel_(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    factors: Sequence[torch.Tensor],
    gating: Gating,
) -> tuple[torch.Tensor, ...]:
    num_rows, width = gate.shape
    grid = (-(-width // SUMMED["columns"]), -(-num_rows // SUMMED["rows"]))
    sums = torch.empty((2, grid[1], width), dtype=torch.float32, device=gate.device)
    launch(
        "elementwise.lengthened_act_and_mul_backward", grid, sums, grad, gate, up,
        row_distance(gate, up), gating.multiplier, *factors, num_rows, width,
        kind=gating.activation, **SUMMED, num_warps=WARPS,
    )  # fmt: skip
    increment_version((grad, gate, up))
    return grad, gate, up, *sums.sum(dim=1)


def _lengthened_gate_by_torch_(
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    factors: Sequence[torch.Tensor],
    gating: Gating,
) -> tuple[torch.Tensor, ...]:
    product, *parts = gating.gradients(grad, gate, up)
    sums = [summed_products(part, y) for part, y in zip(parts, (gate, up), strict=True)]
    grad_gate, grad_up = (part.mul_(factor) for part, factor in zip(parts, factors, strict=True))
    return grad.copy_(product), gate.copy_(grad_gate), up.copy_(grad_up), *sums


def _case_of_lengths(device: torch.device, dtype: torch.dtype, activation: str) -> Case:
    grad, gate, up, *factors = _drawn(3, device, dtype)
    return grad, gate, up, factors, Gating(activation, 0.7)


lengthened_act_and_mul_backward_ = Op(
    "gradients of gates with row lengths",
    reference=_lengthened_gate_by_torch_,
    kernel=_lengthened_gate_by_kernel_,
    case=_case_of_lengths,
    variant=lambda grad, *args: (grad.dtype, args[-1].activation),
)
"""In place, for `grad`, the gradient of `gating` of `gate` and `up` (T, f), which are directions
times `factors`: they become the gradients of the directions, `grad` the product. Returns the three,
and the sums over rows (f,) fp32 of gate and of up times their gradients. gate, up: rows of one
distance, such as halves of a value."""
