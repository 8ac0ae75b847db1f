"""Products with an output head, whose rows begin at whole 16 bytes in memory.

cuBLAS has its fast kernels for such rows alone, and a vocabulary may have any size (Granite
49,159, Olmo 3 100,278, Hunyuan 128,167).
"""

from typing import Any

import torch

ALIGNED_BYTES = 16


def aligned(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Return an empty matrix (rows, columns) with aligned rows, of the type of `like`."""
    unit = ALIGNED_BYTES // like.element_size()
    stride = -(-columns // unit) * unit
    return torch.empty_strided((rows, columns), (stride, 1), dtype=like.dtype, device=like.device)


def head_product(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return hidden W^T + b (rows, vocab) in aligned rows. It has no gradient.

    hidden: (rows, hidden_size); weight: (vocab, hidden_size); bias: (vocab,). They are cast to the
    type of the hidden states.
    """
    with torch.no_grad():
        weight = weight.to(hidden.dtype)
        product = aligned(len(hidden), len(weight), hidden)
        if bias is None:
            return torch.mm(hidden, weight.T, out=product)
        return torch.addmm(bias.to(hidden.dtype), hidden, weight.T, out=product)


class _FrozenProduct(torch.autograd.Function):
    """`head_product` with a gradient for the hidden states alone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return head_product(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] @ weight.to(grads[0].dtype), None, None


class _Float32(torch.autograd.Function):
    """A matrix of a half type in fp32, whose gradient has aligned rows. A node of its own, so that
    autograd lets go of the fp32 gradient before the product.
    """

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
    """Return the logits (rows, vocab) fp32 of `head_product`, with their gradient."""
    logits: torch.Tensor = _FrozenProduct.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
    if logits.dtype == torch.float32:
        return logits
    widened: torch.Tensor = _Float32.apply(logits)  # type: ignore[no-untyped-call]
    return widened


def with_aligned_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix as it is if its rows are aligned, else a copy with aligned rows."""
    if matrix.stride(0) * matrix.element_size() % ALIGNED_BYTES == 0:
        return matrix
    return aligned(len(matrix), matrix.shape[1], matrix).copy_(matrix)
