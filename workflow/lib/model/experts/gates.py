"""What experts compute between their two products: any function that a family has, by autograd, and
those that kernels know (`kernels.experts.gates`) by them."""

from collections.abc import Callable

import torch

from workflow.lib.kernels.experts.gates import (
    ACTIVATIONS,
    CLAMPED,
    GateForm,
    by_torch,
    gated,
    gated_backward_,
    gradients_by_torch_,
)
from workflow.lib.kernels.experts.routing import Routing
from workflow.lib.model.tried_classes.magnitudes import agree, magnitudes


class Gate:
    """The function of a family, (R, 2 f) to (R, f) or without a gate (R, f) to (R, f)."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function, self.form = function, _form_of(function)

    def product(self, up: torch.Tensor) -> torch.Tensor:
        """Return the function of up(x), for forward."""
        if self.form is not None and gated.takes_kernel(up, self.form):
            return gated(up, self.form)
        return self._function(up)

    def gradients(
        self, up: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the function's value p (R, f), the gradient of up(x), and that of the router's
        weights (T, k) fp32, for `grad`, the gradient of p before a row's weight is multiplied.

        `up` and `grad` may be written over."""
        given = (grad, up, weights, routing.order)
        if self.form is not None and gated_backward_.takes_kernel(*given, self.form):
            return gated_backward_(*given, self.form)
        return gradients_by_torch_(*given, self._function)


def _form_of(function: Callable[[torch.Tensor], torch.Tensor]) -> GateForm | None:
    """Return what the kernels compute for the function, by trying; None for any other.

    The constants of a clamped gate are those of the module whose method the function is."""
    forms = [GateForm(name) for name in ACTIVATIONS]
    module = getattr(function, "__self__", None)
    alpha, limit = (getattr(module, name, None) for name in ("alpha", "limit"))
    if isinstance(alpha, float) and isinstance(limit, float):
        forms.append(GateForm(CLAMPED, alpha, limit))
    return next((form for form in forms if _agree(function, form)), None)


def _agree(function: Callable[[torch.Tensor], torch.Tensor], form: GateForm) -> bool:
    """Compare a function with a form on random values of all magnitudes."""
    up = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    return agree(
        lambda magnitude: function(magnitude * up),
        lambda magnitude: by_torch(magnitude * up, form),
        at=magnitudes(function),
        tolerance=1e-6,
    )
