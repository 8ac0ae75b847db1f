"""One value as two autograd nodes: the first saves all that its gradient needs, the second computes
the value and saves nothing.

Recomputation of a layer (non-reentrant `checkpoint`) ends with the last saved tensor: if the first
node of the last linear saves it, that linear's matmul is skipped. A single node would save after
its forward, too late. A placeholder of the value's shape, without memory, links the two."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def apply_split(
    gradient: type[torch.autograd.Function],
    *args: Any,
    value: Callable[..., torch.Tensor],
    valued: bool = True,
) -> torch.Tensor:
    """Return a value with the gradient of the node `gradient`, applied to `args`. The node's
    forward returns `first_outputs`; `value` computes the value from its intermediates. Not valued:
    return the placeholder."""
    outputs: tuple[torch.Tensor, ...] = gradient.apply(*args)
    placeholder, *intermediates = outputs
    if not valued:
        return placeholder
    make: Callable[..., torch.Tensor] = _Value.apply
    return make(placeholder, partial(value, *intermediates))


def first_outputs(
    ctx: Any, x: torch.Tensor, *intermediates: torch.Tensor, out_features: int
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of the first node: a placeholder (..., out_features) for a value computed
    from x (..., in_features), and the intermediates that the second node needs."""
    ctx.mark_non_differentiable(*intermediates)
    # Otherwise backward gets a gradient of zeros for each of the intermediates.
    ctx.set_materialize_grads(False)
    placeholder = x.new_empty(()).expand(*x.shape[:-1], out_features)
    return placeholder, *intermediates


class _Value(torch.autograd.Function):
    """The second node: autograd sees only the placeholder as its input, not `compute`'s tensors."""

    @staticmethod
    def forward(
        ctx: Any, placeholder: torch.Tensor, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        # no view: a family may change it in place
        return compute().view(placeholder.shape).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
