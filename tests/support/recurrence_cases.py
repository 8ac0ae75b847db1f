"""What the kernels of recurrent layers are compared with, on GPUs and in Triton's interpreter."""

from typing import NamedTuple

import torch
from torch import nn

from workflow.lib.model.layers.recurrences import short_convolution as short


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


def convolutions(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return convolutions and gradients of their input by the kernels, each followed by autograd's
    in fp32; of `CONVOLUTIONS`.
    """
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
