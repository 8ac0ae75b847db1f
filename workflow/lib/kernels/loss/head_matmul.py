"""Matmuls with an output head of any number of rows, as fast as for a round number.

cuBLAS is fast only where a matmul's sizes are multiples of 8 and matrix rows begin at whole 16
bytes; for the head of Hunyuan (128,167 rows) its other kernels take 7 times as long. So logits lie
in aligned rows, and the rest beyond a multiple of 64 is a matmul of its own."""

from typing import Any

import torch
from torch import nn

ALIGNED_BYTES = 16
ROUND = 64


def aligned(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Return an empty matrix (rows, columns) with aligned rows, of the type of `like`."""
    unit = ALIGNED_BYTES // like.element_size()
    return like.new_empty(rows, -(-columns // unit) * unit)[:, :columns]


def head_matmul(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return hidden W^T + b (rows, vocab) in aligned rows. It has no gradient. hidden: (rows,
    hidden_size); weight: (vocab, hidden_size); bias: (vocab,). They are cast to the type of the
    hidden states."""
    with torch.no_grad():
        weight = weight.to(hidden.dtype)
        raw_logits = aligned(len(hidden), len(weight), hidden)
        for part in _parts(len(weight)):
            if bias is None:
                torch.mm(hidden, weight[part].T, out=raw_logits[:, part])
            else:
                own = bias[part].to(hidden.dtype)
                torch.addmm(own, hidden, weight[part].T, out=raw_logits[:, part])
        return raw_logits


def states_gradient(slope: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return slope W (rows, hidden_size): the gradient of the hidden states of `head_matmul`.
    slope: (rows, vocab), fast in aligned rows; weight: (vocab, hidden_size), cast to its type."""
    weight = weight.to(slope.dtype)
    whole, *remaining_parts = _parts(len(weight))
    gradient = slope[:, whole] @ weight[whole]
    for part in remaining_parts:
        gradient.addmm_(slope[:, part], weight[part])
    return gradient


def _parts(vocab: int) -> list[slice]:
    """Return the columns of the matmuls of one over a vocabulary."""
    whole = vocab // ROUND * ROUND
    parts = [slice(0, whole), slice(whole, vocab)]
    return [part for part in parts if part.stop > part.start] or [slice(0, 0)]


class _FrozenHead(torch.autograd.Function):
    """`head_matmul` with a gradient for the hidden states alone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return head_matmul(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return states_gradient(grads[0], weight), None, None


class _Float32(torch.autograd.Function):
    """A 16-bit matrix in fp32, whose gradient has aligned rows. As a node of its own, it lets
    autograd free the fp32 gradient before the matmul."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        ctx.dtype = matrix.dtype
        return matrix.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        return aligned(len(grad), grad.shape[1], grad.new_empty(0, dtype=ctx.dtype)).copy_(grad)


def frozen_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the logits (rows, vocab) fp32 of `head_matmul`, with their gradient."""
    if hidden.dtype == torch.float32:
        bias = None if bias is None else bias.to(hidden.dtype)
        return nn.functional.linear(hidden, weight.to(hidden.dtype), bias)
    raw_logits = _FrozenHead.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
    logits: torch.Tensor = _Float32.apply(raw_logits)  # type: ignore[no-untyped-call]
    return logits


def with_aligned_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix itself if its rows are aligned, else a copy with aligned rows."""
    if matrix.stride(0) * matrix.element_size() % ALIGNED_BYTES == 0:
        return matrix
    return aligned(len(matrix), matrix.shape[1], matrix).copy_(matrix)
