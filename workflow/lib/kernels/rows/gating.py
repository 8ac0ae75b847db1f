"""The gate of a feed-forward, act(gate) * up, and its gradients: kernels add the adapters' parts
when they read gate and up (`low_rank`)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from workflow.lib.kernels.op import Case, Op
from workflow.lib.kernels.rows.low_rank import (
    LowRank,
    add_by_torch_,
    case_values,
    launch_with_parts,
)


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
