"""What compiled flex attention asks of a GPU's allocator, without computing: for recordings, whose
device cannot compile.

As torch 2.11 compiles it, measured on an H200: two numbers a query in forward, of which one is
kept; in backward one more, and gradients of as many heads as there are. The results lie in memory
as the queries do. With sinks the weights' sum is put right behind the kernel: one more output in
forward and one more gradient in backward, which no GPU has measured.
"""

from typing import Any

import torch


def allocate_like_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return an output (rows, seq_len, heads, value_dim) without values; arguments as in
    `flex_attention`.
    """
    output: torch.Tensor = _Kernel.apply(query, key, value)  # type: ignore[no-untyped-call]
    if sinks is not None:
        output = _Sinks.apply(output, sinks)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        order = sorted(range(4), key=query.stride, reverse=True)
        shape = (*query.shape[:-1], value.shape[-1])
        output = torch.empty_permuted(shape, order, dtype=value.dtype, device=value.device)
        log_sums, _ = _of_queries(query), _of_queries(query)
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        _products = _of_queries(query)  # of gradient and output, while the kernel runs
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(output, sinks)
        return torch.empty_like(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, sinks = ctx.saved_tensors
        return torch.empty_like(output), torch.empty_like(sinks)


def _of_queries(query: torch.Tensor) -> torch.Tensor:
    """One number in fp32 for each query and head."""
    return query.new_empty(query.shape[:-1], dtype=torch.float32)
