"""Activations rounded between forward and backward: what is rounded, that two nodes share a copy,
and that backward gets the values times their scales."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from workflow.lib.kernels.eight_bits.rounding import restored, rounded
from workflow.lib.kernels.exact_activations import keep_exact
from workflow.lib.model.activation_offload import ActivationOffload
from workflow.lib.model.rounded_activations import FLOAT8, RoundedActivations

CPU = torch.device("cpu")
TOKENS, WIDTH = 6, 256
Compute = Callable[..., torch.Tensor]


class Layer(nn.Module):
    """A decoder layer's call: hidden states first, then what all layers get alike."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, hidden: torch.Tensor, *alike: torch.Tensor) -> torch.Tensor:
        return self._compute(hidden, *alike)


def hidden_states(width=WIDTH):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, width, generator=draw).requires_grad_()


def expected(x, *, block=128):
    """What comes back of rows in fp32."""
    copy = rounded(x.detach(), FLOAT8._replace(block=block))
    return restored(copy, dtype=torch.float32)


def run(compute, *alike, offload=False, width=WIDTH):
    stash = ActivationOffload(CPU, window_bytes=4096) if offload else None
    rounding, layer, x = (
        RoundedActivations(torch.float32, stash),
        Layer(compute),
        hidden_states(width),
    )
    rounding.follow_([layer])
    kept: list[Any] = []
    pack = rounding._pack
    rounding._pack = lambda tensor: kept.append(pack(tensor)) or kept[-1]  # type: ignore[method-assign]
    with rounding.forward():
        y = layer(x, *alike)
    y.sum().backward()
    assert x.grad is not None
    return x.grad, kept, stash


@pytest.mark.parametrize("offload", [False, True])
def test_backward_gets_the_values_times_their_scales(offload):
    gradient, *_ = run(torch.square, offload=offload)
    x = hidden_states()
    assert torch.equal(gradient, 2 * expected(x))
    assert not torch.equal(gradient, 2 * x)


def test_restored_values_are_within_a_sixteenth_and_their_zeros_stay():
    """e4m3 has 3 bits of mantissa: half a step is 1 / 16 of the value at most."""
    x = hidden_states().detach()
    x[2] = 0
    back = expected(x)
    normal = x.abs() > x.abs().amax(dim=1, keepdim=True) * 2**-6 / 448 * 2
    assert ((back - x).abs() <= x.abs() / 16)[normal].all()
    assert torch.equal(back[2], x[2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_comes_back_so_and_leaves_other_blocks_alone(bad):
    x = hidden_states().detach()
    clean = expected(x)
    x[1, 3] = bad
    back = expected(x)
    assert not back[1, 3].isfinite()
    assert torch.equal(back[1, 128:], clean[1, 128:])
    assert torch.equal(back[2:], clean[2:])


@pytest.mark.parametrize(("width", "block"), [(192, 64), (40, 128), (384, 128)])
def test_no_scale_crosses_a_row(width, block):
    gradient, *_ = run(torch.square, width=width)
    assert torch.equal(gradient, 2 * expected(hidden_states(width), block=block))


def test_two_nodes_that_save_the_same_bytes_share_a_copy():
    """One as a matrix and one as a cube; it takes 1 byte an element and 4 for 128."""

    def compute(x):
        y = x * 3
        return y.square() + y.view(2, 3, -1).pow(3).view_as(y)

    for offload in (False, True):
        gradient, kept, stash = run(compute, offload=offload)
        y = expected(hidden_states() * 3)
        torch.testing.assert_close(gradient, 3 * (2 * y + 3 * y**2))
        of_y = [view.copy for view in kept if not isinstance(view, torch.Tensor)]
        assert of_y[0] is of_y[-1]
        if stash is not None:
            assert stash.host_bytes == TOKENS * (WIDTH + 4 * WIDTH // 128)


def test_changed_memory_is_rounded_anew():
    def compute(x):
        y = x.detach().clone()
        first = x * y
        y.add_(1)
        return first + x * y

    gradient, *_ = run(compute)
    x = hidden_states().detach()
    torch.testing.assert_close(gradient, expected(x) + expected(x + 1))


def test_what_is_small_or_alike_for_all_layers_or_repeated_stays():
    cosine = torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH)
    repeated = torch.zeros(1, 4, TOKENS, WIDTH)
    low = torch.linspace(-1, 1, TOKENS * (WIDTH // 8 - 1)).view(TOKENS, -1)

    def compute(x, cosine):
        weighed = sum((x.sum() * small).sum() for small in (repeated, low))
        return x * cosine + weighed

    gradient, kept, _ = run(compute, cosine)
    assert all(isinstance(tensor, torch.Tensor) for tensor in kept)
    # `low` sums up to 0 but for rounding, and counts for every element
    torch.testing.assert_close(gradient, cosine, rtol=0, atol=1e-2)


def test_views_of_what_is_kept_exact_stay():
    def compute(x):
        query = x * 2
        keep_exact(query)
        return query.view(2, 3, -1).transpose(0, 1).square()

    gradient, *_ = run(compute)
    assert torch.equal(gradient, 8 * hidden_states())


def test_nothing_between_layers_is_rounded():
    """That may be the input of a layer that is recomputed."""
    layer, x = Layer(lambda x: x + 1), hidden_states()
    rounding = RoundedActivations(torch.float32, None)
    rounding.follow_([layer])
    with rounding.forward():
        y = layer(x.square()).square()
    y.sum().backward()
    exact = x.detach()
    torch.testing.assert_close(x.grad, 2 * exact * 2 * (exact**2 + 1))
