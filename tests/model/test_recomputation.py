"""Layers that are computed again in backward draw the same random numbers then, and keep the state
of these only where they draw."""

from typing import Any

import pytest
import torch
from torch import nn

from workflow.lib.model.recomputation import Recomputed

SIZE = 7


class Layer(nn.Module):
    """Multiplies by a weight and by noise, in a range of 1 - `noise` to 1 + `noise`."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.noise > 0:
            x = x * torch.empty_like(x).uniform_(1 - self.noise, 1 + self.noise)
        return torch.tanh(x * self.weight)


def gradients(layers, calls):
    torch.manual_seed(0)
    x: torch.Tensor = torch.randn(3, SIZE)
    for layer, call in zip(layers, calls, strict=True):
        x = call(layer, x)
    x.sum().backward()
    found = [layer.weight.grad for layer in layers]
    for layer in layers:
        layer.weight.grad = None
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("time", [1, 2], ids="time {}".format)
def test_layer_that_draws_has_the_gradient_of_one_that_is_not_recomputed(time):
    """Another layer draws after it; in the first forward, and when it is known that they draw."""
    layers = [Layer(0.5), Layer(0.5)]
    calls: list[Any] = [Recomputed(), Recomputed()]
    kept = gradients(layers, [lambda layer, x: layer(x)] * 2)
    for _ in range(time):
        found = gradients(layers, calls)
    assert [call.draws for call in calls] == [True, True]
    torch.testing.assert_close(found, kept, rtol=0, atol=0)


def test_state_is_kept_until_a_layer_was_seen_not_to_draw(monkeypatch):
    call, layer = Recomputed(), Layer(0.0)
    set_back: list[Any] = []
    monkeypatch.setattr(torch.random, "set_rng_state", set_back.append)
    monkeypatch.setattr(torch, "set_rng_state", set_back.append)
    gradients([layer], [call])
    assert call.draws is False
    assert set_back
    set_back.clear()
    gradients([layer], [call])
    assert not set_back
