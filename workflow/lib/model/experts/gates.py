"""What experts compute between their two products, with its gradients.

Any function that a family has, by autograd; act(gate) * up of gate and up side by side, which most
families have, by kernels that read and write each value once.
"""

from collections.abc import Callable

import torch
from torch import nn

from workflow.lib.model.experts import grouped_kernels
from workflow.lib.model.experts.routing import Routing
from workflow.lib.model.layers import kernels

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}
"""What the kernels know."""


class Gate:
    """The function of a family, (R, 2 f) to (R, f) or without a gate (R, f) to (R, f)."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function, self.activation = function, _activation_of(function)

    def product(self, up: torch.Tensor) -> torch.Tensor:
        """Return the function of up(x), for forward."""
        if self.activation is not None and kernels.usable(up.device):
            return grouped_kernels.gated(up, activation=self.activation)
        return self._function(up)

    def gradients(
        self, up: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the function's value p (R, f), the gradient of up(x), and that of the router's
        weights (T, k) fp32, for `grad`, the gradient of p before a row's weight is multiplied.

        `up` and `grad` may be written over.
        """
        if self.activation is not None and kernels.usable(up.device):
            of_weights = grouped_kernels.gated_backward_(
                grad, up, weights, routing.order, activation=self.activation
            )
            return grad, up, of_weights
        with torch.enable_grad():
            leaf = up.detach().requires_grad_()
            product = self._function(leaf)
        of_rows = (grad * product.detach()).sum(1, dtype=torch.float32)
        weighted = grad.mul_(weights.reshape(-1, 1)[routing.order])
        (of_up,) = torch.autograd.grad(product, leaf, weighted)
        return product.detach(), of_up, of_rows[routing.places]


def _activation_of(function: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """Return the activation for which the function is act(gate) * up, by trying."""
    draw = torch.Generator().manual_seed(0)
    up = 3.0 * torch.randn(5, 16, generator=draw)
    gate, other = up.chunk(2, dim=-1)
    value = function(up)
    for name, activation in ACTIVATIONS.items():
        expected = activation(gate) * other
        if value.shape == expected.shape and torch.allclose(value, expected, rtol=1e-5, atol=1e-6):
            return name
    return None
