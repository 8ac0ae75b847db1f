"""What experts compute between their two products, with its gradients.

Any function that a family has, by autograd; act(gate) * up of gate and up side by side, which most
families have, and the clamped gate of gpt-oss by kernels that read and write each value once.
"""

from collections.abc import Callable

import torch
from torch import nn

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.kernels.experts import grouped_kernels
from workflow.lib.kernels.experts.grouped_kernels import GateForm
from workflow.lib.kernels.experts.routing import Routing
from workflow.lib.model.tried_classes.magnitudes import agree, magnitudes

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}
"""What the kernels know of gate and up side by side."""


class Gate:
    """The function of a family, (R, 2 f) to (R, f) or without a gate (R, f) to (R, f)."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function, self.form = function, _form_of(function)

    def product(self, up: torch.Tensor) -> torch.Tensor:
        """Return the function of up(x), for forward."""
        if self.form is not None and kernels.usable(up.device):
            return grouped_kernels.gated(up, self.form)
        return self._function(up)

    def gradients(
        self, up: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the function's value p (R, f), the gradient of up(x), and that of the router's
        weights (T, k) fp32, for `grad`, the gradient of p before a row's weight is multiplied.

        `up` and `grad` may be written over.
        """
        if self.form is not None and kernels.usable(up.device):
            of_weights = grouped_kernels.gated_backward_(
                grad, up, weights, routing.order, self.form
            )
            return grad, up, of_weights
        with torch.enable_grad():
            leaf = up.detach().requires_grad_()
            product = self._function(leaf)
        of_rows = (grad * product.detach()).sum(1, dtype=torch.float32)
        weighted = grad.mul_(weights.reshape(-1, 1)[routing.order])
        (of_up,) = torch.autograd.grad(product, leaf, weighted)
        return product.detach(), of_up, of_rows[routing.places]


def clamped(up: torch.Tensor, *, alpha: float, limit: float) -> torch.Tensor:
    """Return what `GateForm` calls so (R, f), of up (R, 2 f)."""
    gate, other = up[..., ::2].clamp(max=limit), up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (other + 1.0)


def _form_of(function: Callable[[torch.Tensor], torch.Tensor]) -> GateForm | None:
    """Return what the kernels compute for the function, by trying; None for any other.

    The constants of a clamped gate are those of the module whose method the function is.
    """
    forms = [GateForm(name) for name in ACTIVATIONS]
    module = getattr(function, "__self__", None)
    alpha, limit = (getattr(module, name, None) for name in ("alpha", "limit"))
    if isinstance(alpha, float) and isinstance(limit, float):
        forms.append(GateForm("clamped", alpha, limit))
    return next((form for form in forms if _agree(function, form)), None)


def _agree(function: Callable[[torch.Tensor], torch.Tensor], form: GateForm) -> bool:
    """Compare a function with a form on random values of all magnitudes."""
    up = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))

    def ours(magnitude: float) -> torch.Tensor:
        if form.kind == "clamped":
            return clamped(magnitude * up, alpha=form.alpha, limit=form.limit)
        gate, other = (magnitude * up).chunk(2, dim=-1)
        return ACTIVATIONS[form.kind](gate) * other

    return agree(
        lambda magnitude: function(magnitude * up), ours, at=magnitudes(function), tolerance=1e-6
    )
