"""What GPU kernels of libraries allocate besides their results.

Read from torch 2.11 to 2.13, and compared with peaks that GPUs have measured
(`tests/gpu/measurements`)."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm})
# cuBLAS on Hopper (aten/src/ATen/cuda/CUDABlas.cpp, parseChosenWorkspaceSize)
WORKSPACE_BYTES = 2**25
DOCUMENT_PADDING = 128  # tokens, of FlashAttention's sums in backward


def workspaces(func: Any, args: Any, result: Any) -> Sequence[int]:
    """Return the bytes of an operation's temporary tensors, which are there together."""
    find = WORKSPACES.get(_name(func))
    return () if find is None else find(args, result)


@cache
def _name(func: Any) -> str:
    return str(func)


def _flash_backward(args: Any, _: Any) -> list[int]:
    """FlashAttention 2, query (tokens, heads, head_dim): sums of rows and the queries' gradient in
    fp32, both padded per document; gradients of keys and values for every query head. Source:
    `mha_varlen_bwd` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp."""
    query, key, starts = args[1], args[2], args[6]
    tokens, heads, head_dim = query.shape
    padded = tokens + DOCUMENT_PADDING * (starts.shape[0] - 1)
    width = -(-head_dim // 32) * 32
    grouped = [query.nbytes, query.nbytes] if key.shape[1] != heads else []
    return [4 * padded * heads, 4 * padded * heads * width, *grouped]


def _efficient_backward(args: Any, _: Any) -> list[int]:
    """Memory-efficient attention, query (rows, heads, seq_len, head_dim): sums, fp32 gradient."""
    query = args[1]
    return [4 * query.shape[:-1].numel(), 4 * query.numel()]


def _like_input(args: Any, _: Any) -> list[int]:
    """exp(x - max), beside its sums."""
    return [args[0].nbytes]


def _like_result(_: Any, result: Any) -> list[int]:
    """The product of gradient and output, which is summed."""
    return [result.nbytes]


WORKSPACES: dict[str, Callable[[Any, Any], Sequence[int]]] = {
    "aten.logsumexp.default": _like_input,
    "aten._softmax_backward_data.default": _like_result,
    "torch_attn._varlen_attn_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
}
