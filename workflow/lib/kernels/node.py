"""An operation as one autograd node that keeps its inputs alone."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

Forward = Callable[..., torch.Tensor]
Backward = Callable[..., Iterable[torch.Tensor]]


def keeping_inputs(
    forward: Forward, backward: Backward | None, *tensors: torch.Tensor | None
) -> torch.Tensor:
    """Return forward(*tensors). backward: gradients of the first of them by the result's gradient
    and the tensors; None: autograd's, computed again."""
    apply: Forward = _KeepingInputs.apply
    return apply(forward, backward, *tensors)


class _KeepingInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Forward, backward: Backward | None, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        # With a backward of its own the forward goes: it may hold tensors.
        ctx.functions = None if backward else forward, backward
        ctx.save_for_backward(*tensors)
        output = forward(*tensors)
        return output if backward else output.detach()  # no view: a family may change it in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        forward, backward = ctx.functions
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        if backward is not None:
            made = [*backward(grads[0], *tensors)]
            return None, None, *made, *[None] * (len(tensors) - len(made))
        again = [
            None if x is None else x.detach().requires_grad_(asked)
            for x, asked in zip(tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            output = forward(*again)
        asked = [x for x in again if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(output, asked, grads))
        return None, None, *(next(found) if asked else None for asked in needed)
