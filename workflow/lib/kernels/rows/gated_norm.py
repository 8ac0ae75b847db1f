"""RMS norms with a gate, which follow a layer's recurrence: one kernel each for forward and
backward, which keep their inputs alone. torch's operations pass over memory in fp32 a dozen
times."""

import torch
from torch import nn

from workflow.lib.kernels.kernel_launch import launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn, keeping

ELEMENTS = 2048  # of a program, or more if a group has more


class GatedNorm(nn.Module):
    """w * n(x) * silu(gate), or w * n(x * silu(gate)); n: by each group's root mean square."""

    def __init__(self, weight: nn.Parameter, *, eps: float, groups: int, gate_first: bool) -> None:
        """weight: (width,), frozen. gate_first: whether x is gated before its norm."""
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps  # names that families' layers read
        self.groups, self.gate_first = groups, gate_first

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the norm of x (..., width) in its type."""
        return gated_norm(x, gate, self)


def by_torch(x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """Return the norm by torch's operations."""
    opened = nn.functional.silu(gate.float())
    value: torch.Tensor = x.float() * opened if norm.gate_first else x.float()
    grouped = value.unflatten(-1, (norm.groups, -1))
    inverse = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    value = (grouped * inverse).flatten(-2) * norm.weight.float()
    return (value if norm.gate_first else value * opened).to(x.dtype)


def forward(x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """Return the norm of x by a kernel."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch("gated_norm.gated_norm", (out,), x, gate, norm)
    return out


def backward(
    grad: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, norm: GatedNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the gate from `grad`, the norm's gradient, by a kernel."""
    made = [torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x, gate)]
    _launch("gated_norm.gated_norm_backward", (*made, grad.contiguous()), x, gate, norm)
    return made[0], made[1]


def _launch(
    kernel: str,
    first: tuple[torch.Tensor, ...],
    x: torch.Tensor,
    gate: torch.Tensor,
    norm: GatedNorm,
) -> None:
    x, gate = _in_rows(x), _in_rows(gate)
    width = x.shape[1] // norm.groups
    num_units, size = len(x) * norm.groups, power_of_two(width)
    units = max(1, ELEMENTS // size)
    launch(
        kernel, (-(-num_units // units),), *first, x, gate, norm.weight, norm.variance_epsilon,
        num_units, norm.groups, width, x.stride(0), gate.stride(0),
        gate_first=norm.gate_first, units=units, size=size,
        num_warps=min(16, max(4, units * size // 512)),
    )  # fmt: skip


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., width) as rows at equal distances, with contiguous columns."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _case(device: torch.device, dtype: torch.dtype, gate_first: bool) -> Case:
    x, gate, weight = drawn(device, dtype, (5, 96), (5, 96), (96,))
    parameter = nn.Parameter(weight, requires_grad=False)
    norm = GatedNorm(parameter, eps=1e-5, groups=2, gate_first=gate_first)
    return x.requires_grad_(), gate.requires_grad_(), norm


# Backward reads the norm's weight again: FSDP has gathered it by then.
gated_norm = Op(
    "gated norms",
    reference=keeping(2, by_torch),
    kernel=keeping(2, forward, backward),
    case=_case,
    variant=lambda *arguments: (arguments[0].dtype, arguments[2].gate_first),
)
