"""Causal convolutions over a few tokens, channel by channel, before a layer's recurrence.

One kernel each for forward and backward, in the layout of linears. On an H100 torch's operations
take 0.9 ms forward and 5.6 backward for 4,096 tokens of 10,240 channels."""

import torch
from torch import nn

from workflow.lib.kernels.kernel_launch import WARPS, launch
from workflow.lib.kernels.op import Case, Op, drawn, keeping

ROWS, COLUMNS = 32, 128  # tokens and channels of a program


def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool
) -> torch.Tensor:
    """Return, for each token, the sum of its channel's taps times it and the tokens before it (zero
    before the row begins), plus a bias; silu: apply it to that. x and result: (rows, channels,
    tokens), the result with contiguous channels. weight: (channels, taps), the last tap for the
    token itself, frozen; bias: (channels,), frozen."""
    return convolved(x.transpose(1, 2), weight, bias, silu).transpose(1, 2)


def _torch_forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    value = _summed(x, weight, bias)
    return (nn.functional.silu(value) if silu else value).to(x.dtype).contiguous()


def _torch_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    slope = grad.float()
    if silu:
        value = _summed(x, weight, bias)
        share = value.sigmoid()
        slope = slope * share * (1 + value * (1 - share))
    # A token's gradient comes from itself and later tokens: the same in reverse order.
    return _summed(slope.flip(1), weight, None).flip(1).to(x.dtype)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """Return the convolution of x (rows, tokens, channels) by a kernel."""
    x = _by_token(x)
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch("convolution.convolved", output, (x,), weight, bias, silu=silu)
    return output


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Return the gradient of x alone from `grad`, the convolution's gradient, by a kernel."""
    x = _by_token(x)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch("convolution.convolved_backward", grad_x, (_by_token(grad), x), weight, bias, silu=silu)
    return grad_x


def _summed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the sums over taps of x (rows, tokens, channels) in fp32."""
    channels, taps = weight.shape
    padded = nn.functional.pad(x.float().mT, (taps - 1, 0))
    shift = None if bias is None else bias.float()
    return nn.functional.conv1d(padded, weight.float()[:, None], shift, groups=channels).mT


def _by_token(x: torch.Tensor) -> torch.Tensor:
    """Return x (rows, tokens, channels) with contiguous channels."""
    return x if x.stride(2) == 1 else x.contiguous()


def _launch(
    kernel: str,
    out: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
) -> None:
    weight = weight.contiguous()
    rows, tokens, channels = out.shape
    strides = [stride for x in reversed(inputs) for stride in x.stride()[:2]]
    launch(
        kernel, (rows * -(-tokens // ROWS), -(-channels // COLUMNS)), out, *inputs, weight,
        weight if bias is None else bias, tokens, channels, *strides,
        taps=weight.shape[1], biased=bias is not None, silu=silu, rows=ROWS, columns=COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip


def _case(device: torch.device, dtype: torch.dtype) -> Case:
    x, weight, bias = drawn(device, dtype, (2, 9, 40), (40, 4), (40,))
    return x.requires_grad_(), weight, bias, True


convolved = Op(
    "short convolutions",
    reference=keeping(3, _torch_forward, _torch_backward),
    kernel=keeping(3, forward, backward),
    case=_case,
)
"""`short_convolution` of (rows, tokens, channels); keeps its input alone."""
