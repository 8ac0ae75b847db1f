"""Attention over packed rows, without a mask, and never from one document to another.

Flash implementations get all rows as one, with the documents' bounds (`cu_seq_lens`), which
Transformers finds in batches of one row alone (`_is_packed_sequence`, 5.23). Documents of one
length go to cuDNN where it is faster, wide heads to the project's kernels. `varlen` is torch's own
FlashAttention (torch.nn.attention.varlen)."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from workflow.lib.kernels.attention.arguments import (
    check_arguments,
    mask_kind,
    refuse_without_documents,
)
from workflow.lib.kernels.attention.attention_choice import FLASH, FLEX, VARLEN, WIDEST_HEAD
from workflow.lib.kernels.attention.document_lengths import document_starts
from workflow.lib.kernels.attention.head_exchange import over_whole_rows
from workflow.lib.kernels.attention.head_groups import (
    GROUPS,
    by_head_groups,
    cudnn_kernels,
    varlen_kernels,
)
from workflow.lib.kernels.attention.kept_results import KeptResults
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts
from workflow.lib.kernels.attention.wide import wide_attention
from workflow.lib.system.device_types import RECORDED

FLATTENED = frozenset({VARLEN, FLASH, "flash_attention_3"})

# torch 2.11 accepts fewer key than query heads by itself, newer releases need this option.
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def document_bounds(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return `cu_seq_lens` (documents + 1,) int32 and the longest document's tokens. position_ids:
    (rows, seq_len), rising by 1 within a document; every row starts a document."""
    starts = document_starts(position_ids).flatten().nonzero().flatten()
    bounds = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    return bounds.to(torch.int32), int(bounds.diff().max())


def flash_arguments(bounds: torch.Tensor, longest: int) -> dict[str, torch.Tensor | int]:
    """Return the bounds under the names that Transformers' attention layers pass on."""
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@over_whole_rows
def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    shared_prompts: SharedPrompts | None = None,
    in_head_groups: bool = False,
    kept: KeptResults | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents, in the form of Transformers' attention functions. query:
    (1, heads, tokens, head_dim); key, value: (1, key_value_heads, tokens, head_dim). Returns (1,
    tokens, heads, head_dim) and no weights. in_head_groups: backward takes less memory; kept: see
    `by_head_groups`. Raises `UserError` for arguments that it cannot follow."""
    others["chunked attention"] = mask_kind(module, sliding_window).chunk
    if query.device.type == RECORDED:  # here for FlashAttention, whose kernels cap scores
        others.pop("softcap", None)
    check_arguments(
        module, others, attention_mask=attention_mask, is_causal=is_causal, dropout=dropout,
        implementation=VARLEN, instead=FLEX,
    )  # fmt: skip
    if cu_seq_lens_q is None or max_length_q is None:
        refuse_without_documents(module, implementation=VARLEN)
    # squeezed, not indexed: an index's backward fills a tensor with zeros and copies into it
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    bounds, longest = cu_seq_lens_q, max_length_q  # of keys
    if shared_prompts is not None:
        k, v = shared_prompts.gathered(k), shared_prompts.gathered(v)
        bounds, longest = shared_prompts.bounds, shared_prompts.longest
    if query.shape[-1] > WIDEST_HEAD:
        inputs = (q, k, v, cu_seq_lens_q)
        wide = wide_attention(*inputs, scale=scaling, window=sliding_window, longest=max_length_q)
        return wide[None], None
    alike = (cu_seq_lens_q.numel() - 1) * max_length_q == query.shape[2]
    output: Any = None
    attend: Callable[..., torch.Tensor] | None = None
    if in_head_groups or kept is not None:
        attend = partial(by_head_groups, groups=GROUPS if in_head_groups else 1, kept=kept)
    if alike and sliding_window is None and shared_prompts is None:
        output = _equal_lengths_attention(
            q, k, v, length=max_length_q, scaling=scaling, attend=attend
        )
    if output is None:
        documents = cu_seq_lens_q, bounds, max_length_q, longest
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        if attend is not None:
            kernels = varlen_kernels(
                *documents, scale=scaling, window=window, options=GROUPED_HEADS
            )
            output = attend(kernels, q, k, v)
        else:
            output = varlen_attn(
                *(q, k, v, *documents), scale=scaling, window_size=window, **GROUPED_HEADS
            )
    assert isinstance(output, torch.Tensor)
    return output[None], None


def _equal_lengths_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    length: int,
    scaling: float | None,
    attend: Callable[..., torch.Tensor] | None,
) -> torch.Tensor | None:
    """Return causal attention (tokens, heads, head_dim) within documents of `length` tokens each by
    cuDNN; None where cuDNN cannot be used. attend: by these kernels, in place of autograd's."""
    queries, keys, values = (  # (documents, heads, length, head_dim)
        x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v)
    )
    if not _cudnn_serves(queries, keys, values):
        return None
    if attend is not None:
        output = attend(cudnn_kernels(scaling, length), queries, keys, values)
        return output.transpose(1, 2).flatten(0, 1)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True
        )
    return output.transpose(1, 2).flatten(0, 1)


def _cudnn_serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether cuDNN attends over documents of one length (documents, heads, length, head_dim),
    faster than FlashAttention 2: from Hopper on in 0.6 of its time (4,096 tokens, 64 heads, 8 of
    keys, H200). Its packed form plans for 40 ms at every call (torch 2.11, cuDNN 9.19, November
    2026). Not in deterministic runs."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    if q.device.type != "cuda" or torch.version.hip:
        return False
    if torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


AttentionInterface.register(VARLEN, varlen_attention)
