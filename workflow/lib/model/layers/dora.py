"""DoRA on an NF4 weight (arXiv 2402.09353), as an extension that PEFT offers for it
(`LoraVariant`).

y = (m / n) * (W x + s B A x) + b: the trained magnitudes m (out,) start as the row norms of W; n,
the row norms of W + s B A, is a constant to autograd (sec. 4.3). PEFT's own layer would need the
weight when adapters are injected, where ours is on meta, and the sum W + s B A in memory. Here its
norm is expanded: n^2 = |W|^2 + 2 s B (W A^T) + s^2 B (A A^T) B^T, row by row, so only a product of
width r is added. Magnitudes are filled by `lora.init_adapters_`.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import LoraVariant
from torch import nn

from workflow.lib.model.layers.nf4_linear import NF4Linear
from workflow.lib.model.layers.nf4_lora_matmul import nf4_lora_matmul

GRADIENT_CHUNKS = 8  # of rows, for the products in fp32 of which a magnitude's gradient is the sum


class Magnitude(nn.Module):
    """Holds m (out_features,) fp32 under the name that PEFT's files expect."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features))


class NF4Dora(LoraVariant):
    """What PEFT's layer does with DoRA on an `NF4Linear`."""

    @staticmethod
    def init(module: Any, adapter_name: str, **unused: Any) -> None:
        """Give `module`, on which PEFT has put A and B, its magnitudes."""
        module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        module.lora_magnitude_vector[adapter_name] = Magnitude(module.out_features)

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **unused: Any
    ) -> torch.Tensor:
        """Return the output with dropout, which PEFT applies to everything but the plain product
        `result`.
        """
        dropped = module.lora_dropout[active_adapter](x).to(result.dtype)
        base: NF4Linear = module.get_base_layer()
        update = scaled(module, dropped, bias=False) - without_bias(base(dropped), base)
        return result + update


def scaled(layer: Any, x: torch.Tensor, *, bias: bool) -> torch.Tensor:
    """Return (m / n) * (W x + s B A x), and b if `bias`; x: (..., in_features)."""
    base: NF4Linear = layer.get_base_layer()
    scale, magnitude = layer.fused_scale(), layer.fused_magnitude()
    factor = magnitude / direction_norms(layer, scale, dtype=x.dtype)
    direction = without_bias(nf4_lora_matmul(x, layer), base)
    y = lengthened(direction, factor)
    return y + base.bias if bias and base.bias is not None else y


def lengthened(direction: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return direction (..., out) times factor (out,) fp32, in the type of `direction`; the
    factor's gradient is made in fp32.
    """
    y: torch.Tensor = _Lengthened.apply(direction, factor)  # type: ignore[no-untyped-call]
    return y


class _Lengthened(torch.autograd.Function):
    """Autograd alone would round the factor's gradient, a sum over all tokens, to the type of the
    products.
    """

    @staticmethod
    def forward(ctx: Any, direction: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(direction, factor)
        return direction * factor.to(direction.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        direction, factor = ctx.saved_tensors
        of_factor = torch.zeros_like(factor)
        rows = (x.flatten(0, -2) for x in (grads[0], direction))
        for grad, value in zip(*(x.chunk(GRADIENT_CHUNKS) for x in rows), strict=True):
            of_factor += grad.to(torch.float32, copy=True).mul_(value).sum(dim=0)
        return grads[0] * factor.to(direction.dtype), of_factor


def without_bias(y: torch.Tensor, base: NF4Linear) -> torch.Tensor:
    """Return y - b."""
    return y if base.bias is None else y - base.bias


@torch.no_grad()
def direction_norms(layer: Any, scale: float, *, dtype: torch.dtype) -> torch.Tensor:
    """Return the row norms (out,) fp32 of W + s B A; W is dequantized to `dtype`."""
    weight = layer.get_base_layer().dequantize(dtype)
    a_weight, b_weight = layer.fused_weights()
    crossed = (weight @ a_weight.to(dtype).t()).float()
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    squares += 2 * scale * (b_weight * crossed).sum(dim=1)
    squares += scale**2 * ((b_weight @ (a_weight @ a_weight.t())) * b_weight).sum(dim=1)
    norms: torch.Tensor = squares.clamp_min(0.0).sqrt()
    return norms
