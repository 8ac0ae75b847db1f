"""The row lengths of DoRA on an NF4 weight (arXiv 2402.09353).

y = f (W x + s B A x) + b with f = m / n by row: trained magnitudes m (out,), at first the row norms
of W; n, the row norms of W + s B A, is a constant to autograd (sec. 4.3). PEFT would need the sum
in memory. Here n^2 = |W|^2 + 2 s B (W A^T) + s^2 B (A A^T) B^T by row: one matmul of width r more.
The gradient of f is the fp32 sum over tokens of g y / f, so backward keeps the value y alone."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from workflow.lib.kernels.rows import gating


class Magnitude(nn.Module):
    """Holds m (out_features,) fp32 under the name that PEFT's files expect."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features))


@torch.no_grad()
def direction_norms(layer: Any, *, dtype: torch.dtype) -> torch.Tensor:
    """Return the row norms (out,), at least fp32, of W + s B A; W is dequantized to `dtype`."""
    weight, scale = layer.get_base_layer().dequantize(dtype), layer.fused_scale()
    a_weight, b_weight = layer.fused_weights()
    precise = torch.promote_types(dtype, torch.float32)
    crossed = (weight @ a_weight.to(dtype).t()).to(precise)
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=precise).square()
    squares += 2 * scale * (b_weight * crossed).sum(dim=1)
    squares += scale**2 * ((b_weight @ (a_weight @ a_weight.t())) * b_weight).sum(dim=1)
    norms: torch.Tensor = squares.clamp_min(0.0).sqrt()
    return norms


def lengthened(direction: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return direction (..., out) times factor (out,) fp32, in the type of `direction`."""
    lengthen: Callable[..., torch.Tensor] = _Lengthened.apply
    return lengthen(direction, factor)


class _Lengthened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, direction: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        y = gating.lengthen(torch.empty_like(direction), direction, factor)
        ctx.save_for_backward(y, factor)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, factor = ctx.saved_tensors
        (grad_direction,), (grad_factor,) = lengthen_backward(grads, [y], [factor])
        return grad_direction, grad_factor


def lengthen_backward(
    grads: Sequence[torch.Tensor], values: Sequence[torch.Tensor], factors: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of directions (..., out) and factors (out,) from the values'."""
    grad_directions, grad_factors = [], []
    for grad, y, factor in zip(grads, values, factors, strict=True):
        grad_direction, sums = gating.lengthen_backward(grad, y, factor)
        grad_directions.append(grad_direction)
        grad_factors.append(sums / factor)
    return grad_directions, grad_factors
