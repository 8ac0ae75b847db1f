"""Norms in one pass over memory: RMS norms and LayerNorms, with and without a bias, times w, or
times 1 + w as in Gemma, Qwen3.5 and Nemotron.

torch's own operations multiply by w alone, and 1 + w in 16 bits would lose digits of w. Backward
keeps x alone, and recomputes mean and root. As an RMS norm, on an H100, 4,096 rows of 8,192 take
0.051 ms forward and 0.085 backward, torch's operation 0.075 and 0.121."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from workflow.lib.kernels.kernel_launch import launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn, keeping

ELEMENTS = 4096  # of a program, or more if a row has more
THREAD_ELEMENTS = 16


class Norm(Protocol):
    """A norm's parameters; backward reads them again, when FSDP has gathered them."""

    @property
    def weight(self) -> torch.Tensor:
        """(width,), frozen."""

    @property
    def bias(self) -> torch.Tensor | None:
        """(width,), frozen."""

    eps: float
    offset: float  # added to the weight: 0 or 1
    subtracts_mean: bool  # whether it is a LayerNorm


def _torch_forward(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    factors, bias = norm.offset + norm.weight.float(), norm.bias
    if norm.subtracts_mean:
        shift = None if bias is None else bias.float()
        y = nn.functional.layer_norm(x.float(), factors.shape, factors, shift, norm.eps)
    else:
        y = nn.functional.rms_norm(x.float(), factors.shape, factors, norm.eps)
        y = y if bias is None else y.add_(bias)
    return y.to(x.dtype)


def _torch_backward(grad: torch.Tensor, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    deviation = x.float()
    if norm.subtracts_mean:
        deviation = deviation - deviation.mean(-1, keepdim=True)
    inverse = deviation.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    normal, slope = deviation * inverse, grad.float() * (norm.offset + norm.weight.float())
    mean = (slope * normal).mean(-1, keepdim=True)
    if norm.subtracts_mean:
        slope = slope - slope.mean(-1, keepdim=True)
    return slope.sub_(normal.mul_(mean)).mul_(inverse).to(x.dtype)


def forward(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the norm of x (..., width) by a kernel."""
    x = _readable(x)
    out = torch.empty_like(x)
    bias = norm.weight if norm.bias is None else norm.bias  # an unread pointer without bias
    inputs = (x, norm.weight, bias, *_strides(out, x))
    _launch("norm.norm", out, *inputs, norm=norm, biased=norm.bias is not None)
    return out


def backward(grad: torch.Tensor, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the gradient of x (..., width) from `grad`, the norm's gradient, by a kernel."""
    x, grad = _readable(x), _readable(grad)
    grad_x = torch.empty_like(x)
    _launch(
        "norm.norm_backward", grad_x, grad, x, norm.weight, *_strides(grad_x, grad, x), norm=norm
    )
    return grad_x


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., width) itself if its rows are heads of tokens at equal distances, as in a part
    of a wider tensor; else a copy."""
    if x.dim() > 2 and x.stride(-1) == 1:
        leading = [(size, x.stride(i)) for i, size in enumerate(x.shape[:-2]) if size > 1]
        if all(far == size * near for (_, far), (size, near) in pairwise(leading)):
            return x
    return x.contiguous()


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the heads of a token, and the distances of tokens and heads in each tensor; of
    contiguous tensors one head."""
    if all(x.is_contiguous() for x in tensors):
        return 1, *(y for x in tensors for y in (x.shape[-1], 0))
    tokens = max((i for i, size in enumerate(tensors[0].shape[:-2]) if size > 1), default=0)
    return tensors[0].shape[-2], *(y for x in tensors for y in (x.stride(tokens), x.stride(-2)))


def _launch(kernel: str, out: torch.Tensor, *inputs: Any, norm: Norm, **options: Any) -> None:
    width = out.shape[-1]
    num_rows, size = out.numel() // width, power_of_two(width)
    rows = max(1, ELEMENTS // size)
    launch(
        kernel, (-(-num_rows // rows),), out, *inputs, norm.eps, num_rows, width,
        offset=norm.offset, subtracts_mean=norm.subtracts_mean, rows=rows, size=size,
        num_warps=min(32, max(4, rows * size // 32 // THREAD_ELEMENTS)), **options,
    )  # fmt: skip


@dataclass(frozen=True)
class _CaseNorm:
    weight: torch.Tensor
    bias: torch.Tensor
    offset: float = 1.0
    eps: float = 1e-3
    subtracts_mean: bool = True


def _case(device: torch.device, dtype: torch.dtype) -> Case:
    x, weight, bias = drawn(device, dtype, (7, 40), (40,), (40,))
    return x.requires_grad_(), _CaseNorm(weight, bias)


normed = Op(
    "norms",
    reference=keeping(1, _torch_forward, _torch_backward),
    kernel=keeping(1, forward, backward),
    case=_case,
)
"""Returns d / sqrt(mean(d^2) + eps) * (offset + w) + b of x (..., width), where d is x or, of a
LayerNorm, x - mean(x)."""
