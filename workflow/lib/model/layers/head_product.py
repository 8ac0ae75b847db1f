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


class FrozenHead(torch.autograd.Function):
    """Logits of a frozen head in fp32, with a gradient for the hidden states alone."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the logits (rows, vocab) fp32; the arguments are those of `head_product`."""
        ctx.save_for_backward(weight)
        ctx.dtype = hidden.dtype
        return head_product(hidden, weight, bias).float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight = ctx.saved_tensors[0].to(ctx.dtype)
        slope = aligned(len(grads[0]), grads[0].shape[1], weight)
        return slope.copy_(grads[0]) @ weight, None, None


def frozen_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the logits (rows, vocab) fp32 of `head_product`, with their gradient."""
    logits: torch.Tensor = FrozenHead.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
    return logits


def with_aligned_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix as it is if its rows are aligned, else a copy with aligned rows."""
    if matrix.stride(0) * matrix.element_size() % ALIGNED_BYTES == 0:
        return matrix
    return aligned(len(matrix), matrix.shape[1], matrix).copy_(matrix)
