"""The gate between an expert's two matmuls, by kernels that read and write each value once:
act(gate) * up of gate and up side by side, which most families have, and gpt-oss's clamped gate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from workflow.lib.kernels.kernel_launch import WARPS, launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn
from workflow.lib.kernels.rows.gating import ACTIVATIONS

PROGRAM_ELEMENTS = 1024
CLAMPED = "clamped"


class GateForm(NamedTuple):
    """The function of gate and up that the kernels compute."""

    kind: str
    """One of `ACTIVATIONS`: act(gate) * up, side by side. `clamped`: g sigmoid(alpha g) (u + 1)
    with g at most `limit` and u within +-`limit`, gate and up alternating (gpt-oss)."""
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {"kind": self.kind, "alternating": self.kind == CLAMPED, "num_warps": WARPS}


def by_torch(up: torch.Tensor, form: GateForm) -> torch.Tensor:
    """Return the function `form` (R, f) of gate and up (R, 2 f)."""
    if form.kind != CLAMPED:
        gate, other = up.chunk(2, dim=-1)
        return ACTIVATIONS[form.kind][0](gate) * other
    gate, other = up[..., ::2].clamp(max=form.limit), up[..., 1::2].clamp(-form.limit, form.limit)
    return gate * torch.sigmoid(form.alpha * gate) * (other + 1.0)


def _by_kernel(up: torch.Tensor, form: GateForm) -> torch.Tensor:
    num_rows, width = up.shape[0], up.shape[1] // 2
    product = up.new_empty(num_rows, width)
    size = min(PROGRAM_ELEMENTS, power_of_two(width))
    launch(
        "experts.gated", (num_rows, -(-width // size)), product, up.contiguous(), width,
        form.alpha, form.limit, size=size, **form.options,
    )  # fmt: skip
    return product


def _case(device: torch.device, dtype: torch.dtype, kind: str) -> Case:
    (up,) = drawn(device, dtype, (6, 80))
    return 2 * up, GateForm(kind, 1.7, 3.0)


def gradients_by_torch_(
    grad: torch.Tensor,
    up: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    function: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`gated_backward_` of any function of gate and up, by autograd."""
    with torch.enable_grad():
        leaf = up.detach().requires_grad_()
        product = function(leaf)
    grad_weights = torch.empty(weights.numel(), dtype=torch.float32, device=weights.device)
    grad_weights[order] = (grad * product.detach()).sum(1, dtype=torch.float32)
    weighted = grad.mul_(weights.reshape(-1, 1)[order])
    (grad_up,) = torch.autograd.grad(product, leaf, weighted)
    return product.detach(), grad_up, grad_weights.view(weights.shape)


def _gradients_by_torch_(
    grad: torch.Tensor, up: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, form: GateForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return gradients_by_torch_(grad, up, weights, order, lambda x: by_torch(x, form))


def _gradients_by_kernel_(
    grad: torch.Tensor, up: torch.Tensor, weights: torch.Tensor, order: torch.Tensor, form: GateForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, width = grad.shape
    grad_weights = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    size = min(PROGRAM_ELEMENTS, power_of_two(width))
    launch(
        "experts.gated_backward", (num_rows,), grad_weights, grad, up, weights.contiguous(), order,
        width, form.alpha, form.limit, size=size, **form.options,
    )  # fmt: skip
    increment_version((grad, up))  # a second backward is refused
    return grad, up, grad_weights


def _case_of_gradients(device: torch.device, dtype: torch.dtype, kind: str) -> Case:
    up, form = _case(device, dtype, kind)
    draw = torch.Generator().manual_seed(1)
    grad = torch.randn(6, 40, generator=draw).to(device, dtype)
    weights = torch.rand(3, 2, generator=draw).to(device, dtype)
    return grad, up, weights, torch.randperm(6, generator=draw).to(device), form


gated_backward_ = Op(
    "gradients of gates of experts",
    reference=_gradients_by_torch_,
    kernel=_gradients_by_kernel_,
    case=_case_of_gradients,
    variant=lambda grad, *args: (grad.dtype, args[-1].kind),
)
"""Returns the gate's product, the gradient of `up` (R, 2 f) times the row's weight, and that of the
weights (T, k) fp32. grad: (R, f), of `form`'s product before the weight. order: (R,), each row's
place. `grad` and `up` may be overwritten."""
gated = Op(
    "gates of experts",
    reference=by_torch,
    kernel=_by_kernel,
    case=_case,
    variant=lambda up, form: (up.dtype, form.kind),
    backward=gated_backward_,
)
