"""Norms without GPU kernels, which `test_kernels` tries; that their output is not kept: see
`test_nf4_linear`."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.support.families import FAMILIES
from tests.support.kernel_cases import NORMS, exact_norm, norm_module
from workflow.lib.checkpoints.decoder_layers import decoder_layers
from workflow.lib.model.fusion.fuse_layers import fuse_layer_, fuse_layers_
from workflow.lib.model.layers.fused_norm import FusedNorm


@pytest.mark.parametrize("options", {case[2:] for case in NORMS}, ids=str)
def test_values_and_gradients_are_those_of_the_definition(options):
    """In fp32, against fp64; of a row of zeros too, whose LayerNorm has rounding errors of the mean
    divided by the root of eps."""
    draw = torch.Generator().manual_seed(0)
    module = norm_module(13, *options, draw=draw, dtype=torch.float32, device="cpu")
    x, grad = (torch.randn(4, 3, 13, generator=draw) for _ in "xg")
    x[2, 1] = 0
    leaf, exact = x.requires_grad_(), x.detach().double().requires_grad_()
    y, expected = module(leaf), exact_norm(exact, module)
    (of_x,), (of_exact,) = (
        torch.autograd.grad(made, given, grad.to(made.dtype))
        for made, given in ((y, leaf), (expected, exact))
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    largest = float(of_exact.abs().max())
    torch.testing.assert_close(of_x.double(), of_exact, rtol=1e-5, atol=1e-6 * largest)


# offset of the weight, whether the mean is subtracted, and whether there is a bias
KINDS = {
    "llama": (0.0, False, False),
    "gemma": (1.0, False, False),
    "cohere": (0.0, True, False),
    "cohere2": (0.0, True, False),
    "stablelm": (0.0, True, True),
    "starcoder2": (0.0, True, True),
    "gpt_neox": (0.0, True, True),
    "nemotron": (1.0, True, True),
}


@pytest.mark.parametrize("family", KINDS)
def test_norms_of_a_family_are_found(family):
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(FAMILIES[family].config(family))
    names = [name for name, _ in model.named_parameters()]
    fuse_layers_(model)
    assert [name for name, _ in model.named_parameters()] == names
    modules = [m for layer in decoder_layers(model) for m in layer.modules()]
    found = [m for m in modules if isinstance(m, FusedNorm)]
    assert {(m.offset, m.subtracts_mean, m.bias is not None) for m in found} == {KINDS[family]}
    assert not any("Norm" in type(m).__name__ for m in modules if m not in found)


class Norm(nn.Module):
    """An RMS norm that this project knows nothing of."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class OtherEps(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Gated(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * gate)


class Standardized(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize(
    ("norm", "count"),
    [(Norm(24), 1), (Norm(3, 24), 0), (OtherEps(24), 0), (Gated(24), 0), (Standardized(24), 0)],
    ids=["plain", "weights of each head", "another eps", "may be gated", "another root"],
)
def test_norms_are_told_by_what_they_compute(norm, count):
    assert fuse_layer_(nn.ModuleDict({"norm": norm}))["norms"] == count
