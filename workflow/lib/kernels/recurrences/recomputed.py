"""A function of tensors that keeps its inputs alone and is computed again in backward."""

from collections.abc import Callable
from typing import Any

import torch

from workflow.lib.kernels.exact_activations import keep_exact

Computed = Callable[..., torch.Tensor]


def recomputed(function: Computed, *tensors: torch.Tensor | None) -> torch.Tensor:
    """Return function(*tensors), with gradients for those that need them. The tensors are never
    rounded on their way to backward: what is computed from them must be the same again.
    """
    keep_exact(*(x for x in tensors if x is not None))
    apply: Computed = _Recomputed.apply
    return apply(function, *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Computed, *tensors: torch.Tensor | None) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors).detach()  # no view: a family may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        again = [
            None if x is None else x.detach().requires_grad_(asked)
            for x, asked in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            output = ctx.function(*again)
        asked = [x for x in again if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(output, asked, grads))
        return None, *(next(found) if asked else None for asked in needed)
