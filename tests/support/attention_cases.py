"""What the kernels of attention within documents are compared with, on GPUs and in Triton's
interpreter."""

from typing import NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.attention.document_attention import document_kernels
from workflow.lib.kernels.attention.head_groups import by_head_groups


class Packed(NamedTuple):
    lengths: tuple[int, ...]
    """Of documents; a micro-batch of a CUDA graph has some of none at its end."""
    heads: int
    key_heads: int
    width: int
    window: int | None = None
    scale: float | None = None


PACKED = (
    Packed((5, 58, 1, 30, 6, 0), heads=4, key_heads=1, width=128),
    Packed((90, 40), heads=2, key_heads=2, width=64, window=33),
    Packed((20, 7, 70), heads=2, key_heads=1, width=80, scale=1.0 / 8),
    Packed((70, 31, 49, 0, 0), heads=4, key_heads=2, width=320),
    Packed((40,), heads=2, key_heads=1, width=512),
    Packed((33, 64), heads=2, key_heads=2, width=288, window=20, scale=1.0 / 8),
    Packed((1, 1, 2), heads=1, key_heads=1, width=264),
)


def packed(case: Packed, *, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return output and gradients by the kernels, each followed by torch's in fp32, which attends
    over one document at a time. Queries lie behind a transposition, as a norm of heads leaves them.
    """
    draw = torch.Generator().manual_seed(0)
    tokens = sum(case.lengths)
    query = torch.randn(case.heads, tokens, case.width, generator=draw).transpose(0, 1)
    grad = torch.randn(tokens, case.heads, case.width, generator=draw).to(device, dtype)
    key, value = torch.randn(2, tokens, case.key_heads, case.width, generator=draw)
    ours = [x.to(device, dtype).requires_grad_() for x in (query, key, value)]
    bounds = torch.tensor([0, *case.lengths], dtype=torch.int32, device=device).cumsum(0)
    query, key, value = ours
    kernels = document_kernels(bounds.to(torch.int32), tokens, scale=case.scale, window=case.window)
    output = by_head_groups(kernels, query, key, value, groups=1)
    gradients = torch.autograd.grad(output, ours, grad)
    leaves = [x.detach().float().requires_grad_() for x in ours]
    expected = torch.cat([_attended(parts, case) for parts in _documents(leaves, case.lengths)])
    right = torch.autograd.grad(expected, leaves, grad.float())
    pairs = zip((output, *gradients), (expected, *right), strict=True)
    return [x.detach() for pair in pairs for x in pair]


def _documents(given: list[torch.Tensor], lengths: tuple[int, ...]) -> list[list[torch.Tensor]]:
    parts = zip(*(x.split(lengths) for x in given), strict=True)
    return [list(part) for part in parts if len(part[0])]


def _attended(parts: list[torch.Tensor], case: Packed) -> torch.Tensor:
    mask = torch.ones(2 * [len(parts[0])], dtype=torch.bool, device=parts[0].device).tril()
    if case.window is not None:
        mask = mask.triu(1 - case.window)
    query, key, value = (x.transpose(0, 1)[None] for x in parts)
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=case.scale, enable_gqa=True
    )
    return output[0].transpose(0, 1)
