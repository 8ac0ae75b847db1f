"""A value as two autograd nodes."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from workflow.lib.model.layers.split_autograd import apply_split, first_outputs


class SineGradient(torch.autograd.Function):
    """The gradient of three sines of x, side by side; its intermediate is the cosine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cosine = x.cos()
        ctx.save_for_backward(cosine)
        return first_outputs(ctx, x, cosine, out_features=3)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        value_grad, cosine_grad = grads
        assert cosine_grad is None, "no zeros are made for an intermediate"
        (cosine,) = ctx.saved_tensors
        return value_grad.sum(dim=-1, keepdim=True) * cosine


def three_sines(x, calls):
    """Three times sin(x) for x (..., 1); every computation of the value is noted in `calls`."""

    def value(cosine):
        calls.append(cosine)
        return x.sin().reshape(-1, 1).repeat(1, 3)

    return apply_split(SineGradient, x, value=value)


def test_value_and_gradient_are_those_of_one_node():
    x = torch.linspace(-1, 1, 10).view(2, 5, 1).requires_grad_()
    y = three_sines(x, [])
    assert torch.equal(y, x.sin().expand(2, 5, 3))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, 3 * x.cos())


def test_value_is_not_computed_again_by_recomputation():
    x = torch.linspace(-1, 1, 5).view(5, 1).requires_grad_()
    calls: list[torch.Tensor] = []
    checkpoint(lambda x: three_sines(x * 2, calls), x, use_reentrant=False).sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(x.grad, 6 * (2 * x).cos())
