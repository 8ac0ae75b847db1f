"""RMS norms with a gate, as recurrent layers have them behind their recurrence: one kernel forth
and one back, which keep their inputs alone. torch's operations take a dozen passes over memory in
fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.system.device_types import RECORDED

ELEMENTS = 2048  # of a program, or more if a group has more

if kernels.INSTALLED:
    from workflow.lib.kernels.triton_code import gated_norm as gated_norm_code


class GatedNorm(nn.Module):
    """w * n(x) * silu(gate), or w * n(x * silu(gate)), where n divides each group of columns by the
    root of its mean square.
    """

    def __init__(self, weight: nn.Parameter, *, eps: float, groups: int, gate_first: bool) -> None:
        """weight: (width,), frozen. gate_first: whether x is gated before it is divided."""
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps  # names that families' layers ask for
        self.groups, self.gate_first = groups, gate_first

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the norm of x (..., width) in its type."""
        apply: Callable[..., torch.Tensor] = _Gated.apply
        return apply(x, gate, self)


class _Gated(torch.autograd.Function):
    """Asks the norm again for its weight in backward: FSDP has gathered it by then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
        ctx.save_for_backward(x, gate)
        ctx.norm = norm
        return forward(x, gate, norm) if kernels.usable(x.device) else by_torch(x, gate, norm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate = ctx.saved_tensors
        if kernels.usable(x.device):
            return *backward(grads[0], x, gate, ctx.norm), None
        again = [y.detach().requires_grad_() for y in (x, gate)]
        with torch.enable_grad():
            output = by_torch(again[0], again[1], ctx.norm)
        return *torch.autograd.grad(output, again, grads[0]), None


def by_torch(x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """Return what the norm is, by torch's operations."""
    opened = nn.functional.silu(gate.float())
    value: torch.Tensor = x.float() * opened if norm.gate_first else x.float()
    grouped = value.unflatten(-1, (norm.groups, -1))
    inverse = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    value = (grouped * inverse).flatten(-2) * norm.weight.float()
    return (value if norm.gate_first else value * opened).to(x.dtype)


def forward(x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """Return the norm of x by a kernel."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch("gated_norm", (out,), x, gate, norm)
    return out


def backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the gate for that of the norm, `grad`, by a kernel."""
    made = [torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x, gate)]
    _launch("gated_norm_backward", (*made, grad.contiguous()), x, gate, norm)
    return made[0], made[1]


def _launch(
    name: str, first: tuple[torch.Tensor, ...], x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm
) -> None:
    """Start a kernel; a device that is recorded computes nothing."""
    x, gate = _in_rows(x), _in_rows(gate)
    if x.device.type == RECORDED:
        return
    width = x.shape[1] // norm.groups
    num_units, size = len(x) * norm.groups, kernels.power_of_two(width)
    units = max(1, ELEMENTS // size)
    getattr(gated_norm_code, name)[(-(-num_units // units),)](
        *first, x, gate, norm.weight, norm.variance_epsilon, num_units, norm.groups, width,
        x.stride(0), gate.stride(0), gate_first=norm.gate_first, units=units, size=size,
        num_warps=min(16, max(4, units * size // 512)),
    )  # fmt: skip


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., width) as rows at equal distances, whose columns lie side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
