"""Nothing of ours takes the place of what clamps its values, wherever the limit is written."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workflow.lib.model.experts.fused_experts import Gate
from workflow.lib.model.fusion.fuse_layers import _as_fused_norm, as_gated_norm, feed_forward_form
from workflow.lib.model.tried_classes.magnitudes import magnitudes
from workflow.lib.model.tried_classes.recurrence_functions import _replacement_of
from workflow.lib.model.tried_classes.rotary_functions import rotary_form

LIMITS = (0.02, 1.5, 10.0, 5000.0)
NO_LIMIT = 1e30
limits = pytest.mark.parametrize("limit", LIMITS)


class FeedForward(nn.Module):
    """Clamps its gate by an attribute or its config's number."""

    def __init__(self, limit: float, *, by_config: bool = False) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(48, 80) for _ in range(2))
        self.down = nn.Linear(80, 48)
        if by_config:
            self.config = SimpleNamespace(swiglu_limits=[None, limit])
        else:
            self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        limit = self.limit if hasattr(self, "limit") else self.config.swiglu_limits[1]
        y: torch.Tensor = self.down(nn.functional.silu(self.gate(x)).clamp(max=limit) * self.up(x))
        return y


class Norm(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.weight, self.eps, self.limit = nn.Parameter(torch.ones(12)), 1e-6, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return y.clamp(-self.limit, self.limit)


class GatedNorm(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return y * nn.functional.silu(gate).clamp(max=self.limit)


class Experts(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up.clamp(-self.limit, self.limit)


def turned(q, k, cos, sin):
    def one(x):
        left, right = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]

    return one(q), one(k)


def turned_and_clamped(q, k, cos, sin):
    return tuple(x.clamp(-40.0, 40.0) for x in turned(q, k, cos, sin))


def short_convolution(hidden_states, weight, bias=None, activation=None):
    taps = weight.shape[-1]
    y = nn.functional.conv1d(
        hidden_states, weight[:, None], bias, padding=taps - 1, groups=len(weight)
    )
    y = y[..., : hidden_states.shape[-1]]
    return nn.functional.silu(y) if activation in ("silu", "swish") else y


def clamped_convolution(hidden_states, weight, bias=None, activation=None):
    return short_convolution(hidden_states, weight, bias, activation).clamp(max=300.0)


@limits
@pytest.mark.parametrize("by_config", [False, True], ids=["attribute", "config"])
def test_clamped_feed_forward_stays_the_familys(limit, by_config):
    assert feed_forward_form(FeedForward(limit, by_config=by_config)) is None
    assert feed_forward_form(FeedForward(NO_LIMIT, by_config=by_config)) is not None


@limits
def test_clamped_norms_stay_the_familys(limit):
    assert _as_fused_norm(Norm(limit)) is None
    assert as_gated_norm(GatedNorm(limit)) is None
    assert _as_fused_norm(Norm(NO_LIMIT)) is not None
    assert as_gated_norm(GatedNorm(NO_LIMIT)) is not None


@limits
def test_clamped_gate_of_experts_stays_the_familys(limit):
    assert Gate(Experts(limit).gated).form is None
    assert Gate(Experts(NO_LIMIT).gated).form is not None


def test_clamped_functions_stay_the_familys():
    assert rotary_form(turned) is not None
    assert rotary_form(turned_and_clamped) is None
    assert _replacement_of(short_convolution) is not None
    assert _replacement_of(clamped_convolution) is None


def test_values_are_tried_around_every_number_of_module_config_and_code():
    module: Any = FeedForward(7.25, by_config=True)
    module.scale = 0.3
    found = magnitudes(module)
    assert {7.25, 0.3} <= {*found}
    assert found[0] == 1.0
    assert 40.0 in magnitudes(turned_and_clamped)
