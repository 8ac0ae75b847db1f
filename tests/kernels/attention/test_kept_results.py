"""Recomputed layers that keep attention's results."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.kernels.attention.test_packed import attend
from workflow.lib.kernels.attention.kept_results import KeptResults
from workflow.lib.kernels.attention.packed import Kernels, by_head_groups
from workflow.lib.model.activation_offload import ActivationOffload
from workflow.lib.model.recomputation import Recomputed

LAYERS, TOKENS, HEADS, WIDTH = 3, 13, 4, 8
RESULT_BYTES = TOKENS * HEADS * WIDTH * 4


def kernels(calls):
    """Kernels that note their forwards."""

    def forward(*heads):
        calls.append(len(calls))
        return attend(*heads)

    def backward(grad, query, key, value, output, sums):
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        with torch.enable_grad():
            again, sums_again = attend(*leaves)
        assert torch.equal(output, again)
        assert torch.equal(sums, sums_again)
        return torch.autograd.grad(again, leaves, grad)

    return Kernels(forward, backward, sums_dim=0)


class Layers(nn.Module):
    def __init__(self, kept: KeptResults | None, calls: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * LAYERS))
        self.recomputed = [Recomputed(kept) for _ in range(LAYERS)]
        self.kept, self.kernels = kept, kernels(calls)

    def forward(self, states):
        for number, recomputed in enumerate(self.recomputed):

            def layer(x, number=number):
                heads = self.linears[2 * number](x).tanh()
                output = by_head_groups(self.kernels, heads, heads, heads, groups=1, kept=self.kept)
                return x + self.linears[2 * number + 1](output)

            states = recomputed(layer, states)
        return states


def gradients(model: Layers, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    states = torch.randn(TOKENS, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    loss = run(states.requires_grad_()).square().sum()
    return list(torch.autograd.grad(loss, [states, *model.parameters()]))


@pytest.mark.parametrize("offloaded", [False, True], ids=["on the device", "offloaded"])
def test_attention_is_computed_once_and_gradients_are_the_same(offloaded):
    again: list[int] = []
    plain = Layers(None, again)
    expected = gradients(plain, plain)
    assert len(again) == 2 * LAYERS
    kept, calls = KeptResults(), list[int]()
    model, run = Layers(kept, calls), None
    if offloaded:
        offload = ActivationOffload(torch.device("cpu"), window_bytes=2 * RESULT_BYTES)
        kept.pack, kept.unpack = offload.pack, offload.unpack

        def run(states):
            with offload.forward():
                return model(states)

    for _ in range(2):  # a second step has nothing of the first
        found = gradients(model, run or model)
        assert all(map(torch.equal, found, expected))
    assert len(calls) == 2 * LAYERS
    if offloaded:
        assert offload.host_bytes >= 2 * LAYERS * RESULT_BYTES


def test_layers_that_are_not_recomputed_keep_nothing():
    calls: list[int] = []
    model = Layers(KeptResults(), calls)
    model.recomputed = [lambda layer, states: layer(states)] * LAYERS
    gradients(model, model)
    assert len(calls) == LAYERS
