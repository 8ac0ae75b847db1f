"""RMS norms that multiply by 1 + w, as Gemma's and Qwen3.5's do, in one pass over memory.

torch's own operation multiplies by w alone, and 1 + w in 16 bits would lose digits of w. Values are
computed in fp32 and rounded once. Backward keeps x alone, and makes the root again.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from workflow.lib.model.layers import kernels
from workflow.lib.system.device_types import RECORDED

ELEMENTS = 4096  # of a program, or more if a row has more
THREAD_ELEMENTS = 16

if kernels.INSTALLED:
    from workflow.lib.model.layers.fused_kernels import norm_code


class Norm(Protocol):
    """What the node asks of a norm."""

    weight: nn.Parameter
    """(width,), frozen."""
    eps: float


def centered_rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * (1 + w) of x (..., width)."""
    apply: Callable[..., torch.Tensor] = _CenteredRmsNorm.apply
    return apply(x, norm)


class _CenteredRmsNorm(torch.autograd.Function):
    """Asks the norm again for its weight in backward: FSDP has gathered it by then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        weight, eps = norm.weight, norm.eps
        if kernels.usable(x.device):
            return rms_norm(x, weight, eps)
        return nn.functional.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(
            x.dtype
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        weight, eps = ctx.norm.weight, ctx.norm.eps
        if kernels.usable(x.device):
            return rms_norm_backward(grads[0], x, weight, eps), None
        value = x.float()
        inverse = value.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        slope, normed = grads[0].float() * (1.0 + weight.float()), value * inverse
        mean = (slope * normed).mean(-1, keepdim=True)
        return ((slope - normed * mean) * inverse).to(x.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return that norm of x (..., width) by a kernel."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch("rms_norm", out, x, weight, eps)
    return out


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the gradient of x (..., width) for that of the norm, `grad`."""
    x = x.contiguous()
    of_x = torch.empty_like(x)
    _launch("rms_norm_backward", of_x, grad.contiguous(), x, weight, eps)
    return of_x


def _launch(name: str, out: torch.Tensor, *given: Any) -> None:
    """Start a kernel on rows of `out`; a device that is recorded computes nothing."""
    if out.device.type == RECORDED:
        return
    width = out.shape[-1]
    num_rows, size = out.numel() // width, kernels.power_of_two(width)
    rows = max(1, ELEMENTS // size)
    getattr(norm_code, name)[(-(-num_rows // rows),)](
        out, *given, num_rows, width, offset=1.0, rows=rows, size=size,
        num_warps=min(32, max(4, rows * size // 32 // THREAD_ELEMENTS)),
    )  # fmt: skip
