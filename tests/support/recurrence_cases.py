"""What the kernels of recurrent layers are compared with, on GPUs and in Triton's interpreter."""

from typing import NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.recurrences import gated_delta_rule, state_space
from workflow.lib.kernels.recurrences import short_convolution as short
from workflow.lib.kernels.recurrences.gated_delta_rule import by_kernels, by_torch, gradients
from workflow.lib.kernels.recurrences.state_space import Steps
from workflow.lib.kernels.rows import gated_norm


class Convolution(NamedTuple):
    rows: int
    tokens: int
    channels: int
    taps: int
    biased: bool
    silu: bool
    before: int
    """Channels of the tensor that x is a part of, before it and after it."""


CONVOLUTIONS = (
    Convolution(2, 70, 130, 4, biased=True, silu=True, before=0),
    Convolution(2, 33, 40, 4, biased=True, silu=True, before=3),
    Convolution(1, 3, 5, 4, biased=False, silu=False, before=0),
    Convolution(3, short.ROWS, short.COLUMNS, 3, biased=False, silu=True, before=0),
    Convolution(1, short.ROWS + 1, short.COLUMNS + 1, 2, biased=True, silu=False, before=1),
)


class Deltas(NamedTuple):
    rows: int
    tokens: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    normalize: bool


DELTAS = (
    Deltas(2, 130, 2, 4, 32, 64, normalize=True),
    Deltas(1, 100, 1, 3, 48, 80, normalize=False),
    Deltas(2, 5, 1, 2, 24, 8, normalize=True),
    Deltas(1, gated_delta_rule.CHUNK, 2, 2, 16, 32, normalize=False),
    Deltas(1, 70, 1, 1, 256, 128, normalize=True),
)


def deltas(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return outputs and gradients of the gated delta rule by the kernels, each followed by that of
    torch's operations in fp32; of `DELTAS`. Queries and keys are parts of one tensor, and keys have
    a direction in common, so that what a chunk knows already matters."""
    draw = torch.Generator().manual_seed(0)
    results = []
    for case in DELTAS:
        if case.key_width > gated_delta_rule.MOST_KEYS[dtype.itemsize]:
            continue
        rows, tokens, groups, heads, width, value_width, normalize = case
        common = torch.randn(rows, 1, 2, groups, width, generator=draw)
        keys = torch.randn(rows, tokens, 2, groups, width, generator=draw) + 0.7 * common
        both = (keys if normalize else nn.functional.normalize(keys, dim=-1)).to(device, dtype)
        value, grad = torch.randn(2, rows, tokens, heads, value_width, generator=draw)
        decay, rate = torch.rand(2, rows, tokens, heads, generator=draw)
        value, grad, rate = (x.to(device, dtype) for x in (value, grad, rate))
        others = (value, -decay.pow(4).to(device), rate)
        query, key = both.unbind(dim=2)
        leaves = [x.float().requires_grad_() for x in (query, key, *others)]
        of_query, of_key, *of_others = leaves
        expected = by_torch(of_query, of_key, *of_others, normalize=normalize)
        exact = [expected.detach(), *torch.autograd.grad(expected, leaves, grad.float())]
        given = (query, key, *others)
        made = [
            by_kernels(*given, normalize=normalize),
            *gradients(grad, *given, normalize=normalize),
        ]
        results += [x for pair in zip(made, exact, strict=True) for x in pair]
    return results


class Spaces(NamedTuple):
    rows: int
    tokens: int
    heads: int
    width: int
    groups: int
    state_width: int
    skips: bool


SPACES = (
    Spaces(2, 130, 6, 16, 2, 24, skips=True),
    Spaces(1, state_space.CHUNK, 4, 64, 4, 32, skips=False),
    Spaces(2, 5, 2, 8, 2, 16, skips=True),
    Spaces(1, 70, state_space.PORTION + 2, 64, 1, 128, skips=True),
)


def spaces(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return outputs and gradients of the state space by the kernels, each followed by that of
    torch's operations in fp32; of `SPACES`. B and C are parts of one tensor."""
    draw = torch.Generator().manual_seed(0)
    results = []
    for rows, tokens, heads, width, groups, state_width, skips in SPACES:
        x, grad = torch.randn(2, rows, tokens, heads, width, generator=draw).to(device, dtype)
        both = torch.randn(rows, tokens, 2, groups, state_width, generator=draw)
        into, out_of = both.to(device, dtype).unbind(dim=2)
        step = torch.rand(rows, tokens, heads, generator=draw).to(device)
        decay, factors = torch.rand(2, heads, generator=draw).to(device)
        skip = factors if skips else None
        leaves = [y.float().requires_grad_() for y in (x, step, into, out_of)]
        others = -decay, skip, None, Steps(softplus=False, limits=(0.0, 1.0))
        expected = state_space.by_torch(*leaves, *others)
        exact = [expected.detach(), *torch.autograd.grad(expected, leaves, grad.float())]
        given = (x, step, into, out_of, *others)
        made = [state_space.forward(*given), *state_space.backward(grad, *given)]
        results += [y for pair in zip(made, exact, strict=True) for y in pair]
    return results


def largest_error(results: list[torch.Tensor]) -> float:
    """Return the largest difference of a pair, as a share of the largest value expected."""
    pairs = zip(results[::2], results[1::2], strict=True)
    return max(float((x.float() - y).abs().max() / y.abs().max()) for x, y in pairs)


def convolutions(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return convolutions and gradients of their input by the kernels, each followed by autograd's
    in fp32; of `CONVOLUTIONS`."""
    draw = torch.Generator().manual_seed(0)
    results = []
    for case in CONVOLUTIONS:
        rows, tokens, channels, taps, biased, silu, before = case
        wide, grad = (
            torch.randn(rows, tokens, before + channels + before, generator=draw).to(device, dtype)
            for _ in "xg"
        )
        x, grad = (y[..., before : before + channels] for y in (wide, grad))
        weight = torch.randn(channels, taps, generator=draw).to(device, dtype)
        shift = torch.randn(channels, generator=draw).to(device, dtype) if biased else None
        leaf = x.float().requires_grad_()
        exact = None if shift is None else shift.float()
        padded = nn.functional.pad(leaf.mT, (taps - 1, 0))
        value = nn.functional.conv1d(padded, weight.float()[:, None], exact, groups=channels).mT
        expected = nn.functional.silu(value) if silu else value
        (of_x,) = torch.autograd.grad(expected, leaf, grad.float())
        results += [short.forward(x, weight, shift, silu=silu), expected.detach()]
        results += [short.backward(grad, x, weight, shift, silu=silu), of_x]
    return results


# Rows, width, groups, whether the gate comes first, and columns before and after it in its tensor.
GATED_NORMS = (
    (300, 24, 1, False, 0),
    (5, 128, 1, False, 8),
    (37, 96, 4, True, 5),
    (3, 3 * gated_norm.ELEMENTS, 2, True, 0),
)


def gated_norms(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return gated norms and gradients of their inputs by the kernels, each followed by autograd's
    in fp32; of `GATED_NORMS`, with a row of zeros."""
    draw = torch.Generator().manual_seed(0)
    results = []
    for rows, width, groups, gate_first, before in GATED_NORMS:
        x, grad = (torch.randn(rows, width, generator=draw).to(device, dtype) for _ in "xg")
        wide = torch.randn(rows, before + width + before, generator=draw).to(device, dtype)
        gate = wide[:, before : before + width]
        x[1] = 0
        weight = nn.Parameter(torch.randn(width, generator=draw).to(device, dtype))
        norm = gated_norm.GatedNorm(weight, eps=1e-5, groups=groups, gate_first=gate_first)
        leaves = [y.float().requires_grad_() for y in (x, gate)]
        expected = gated_norm.by_torch(*leaves, norm)
        exact = [expected.detach(), *torch.autograd.grad(expected, leaves, grad.float())]
        made = [gated_norm.forward(x, gate, norm), *gated_norm.backward(grad, x, gate, norm)]
        results += [y.detach() for pair in zip(made, exact, strict=True) for y in pair]
    return results
