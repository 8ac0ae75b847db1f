"""Attention over packed rows, without a mask, and never from one document to another.

Flash implementations get all rows as one, with the documents' bounds (`cu_seq_lens`), which
Transformers finds in batches of one row alone (`_is_packed_sequence`, 5.23). `varlen` takes the
fastest: cuDNN for documents of one length, the project's kernels for short documents and for wide
heads, else torch's own FlashAttention 2 (torch.nn.attention.varlen)."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface

from workflow.lib.kernels.attention.answer_rows import document_starts
from workflow.lib.kernels.attention.arguments import (
    check_arguments,
    mask_kind,
    refuse_without_documents,
)
from workflow.lib.kernels.attention.attention_choice import FLASH, FLEX, RECORDED_FLASH, VARLEN
from workflow.lib.kernels.attention.document_attention import document_kernels, takes_documents
from workflow.lib.kernels.attention.head_exchange import over_whole_rows
from workflow.lib.kernels.attention.head_groups import GROUPS, Kernels, Tensors, by_head_groups
from workflow.lib.kernels.attention.kept_results import KeptResults
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts


def varlen_kernels(
    bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float | None,
    window: tuple[int, int],
) -> Kernels:
    """Return torch's FlashAttention over packed documents, heads (tokens, heads, head_dim); the
    arguments are `varlen_attn`'s."""
    documents = bounds, key_bounds, longest, longest_key
    causal, kinds = window == (-1, 0), {"scale": scale, "window_size": list(window)}

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tensors:
        made: Tensors = varlen._varlen_attn(
            query, key, value, *documents, causal, **kinds, **GROUPED_HEADS
        )
        return made

    def backward(*tensors: torch.Tensor) -> Tensors:
        *inputs, random_state = tensors
        made: Tensors = varlen._varlen_attn_backward(
            *inputs, *documents, causal, random_state, **kinds
        )
        return made

    return Kernels(forward, backward, sums_dim=0)


def cudnn_kernels(scale: float | None, length: int) -> Kernels:
    """Return cuDNN's causal attention within documents of `length` tokens, heads (documents, heads,
    length, head_dim)."""
    return Kernels(
        partial(_cudnn_forward, scale), partial(_cudnn_backward, scale, length), sums_dim=1
    )


def _cudnn_forward(scale: float | None, *heads: torch.Tensor) -> Tensors:
    made = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, is_causal=True, scale=scale
    )
    output, sums, seed, offset = made[0], made[1], made[6], made[7]
    return output, sums, seed, offset


def _cudnn_backward(scale: float | None, length: int, *tensors: torch.Tensor) -> Tensors:
    none = (None, None, None)  # of a bias, and of bounds of documents
    made: Tensors = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *tensors, *none, length, length, 0.0, True, scale=scale
    )
    return made


FLATTENED = frozenset({VARLEN, FLASH, "flash_attention_3", RECORDED_FLASH})

# torch 2.11 accepts fewer key than query heads by itself, newer releases need this option.
GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
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
    flash_alone: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents, in the form of Transformers' attention functions. query:
    (1, heads, tokens, head_dim); key, value: (1, key_value_heads, tokens, head_dim). Returns (1,
    tokens, heads, head_dim) and no weights. in_head_groups: backward takes less memory; kept: see
    `by_head_groups`; flash_alone: short documents by FlashAttention 2. Raises `UserError` for
    arguments that it cannot follow."""
    others["chunked attention"] = mask_kind(module, sliding_window).chunk
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
    documents = cu_seq_lens_q.numel() - 1
    alike = documents * max_length_q == query.shape[2] and sliding_window is None
    own_keys = shared_prompts is None
    if own_keys and takes_documents(q, documents, alike=alike or flash_alone):
        kernels = document_kernels(
            cu_seq_lens_q, len(q), scale=scaling, window=sliding_window, longest=max_length_q
        )
        return by_head_groups(kernels, q, k, v, groups=1, kept=kept)[None], None
    attend = partial(by_head_groups, groups=GROUPS if in_head_groups else 1, kept=kept)
    output = None
    if alike and own_keys:
        output = _equal_lengths_attention(q, k, v, length=max_length_q, scale=scaling, by=attend)
    if output is None:
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        both = cu_seq_lens_q, bounds, max_length_q, longest
        output = attend(varlen_kernels(*both, scale=scaling, window=window), q, k, v)
    return output[None], None


def recorded_flash(*heads: Any, softcap: float | None = None, **others: Any) -> Any:
    """Attention that allocates what the package flash-attn does, whose kernels cap scores."""
    return varlen_attention(*heads, flash_alone=True, **others)


def _equal_lengths_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    length: int,
    scale: float | None,
    by: Callable[..., torch.Tensor],
) -> torch.Tensor | None:
    """Return causal attention (tokens, heads, head_dim) within documents of `length` tokens each by
    cuDNN; None where cuDNN cannot be used."""
    heads = [x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v)]
    if not _cudnn_serves(*heads):
        return None
    return by(cudnn_kernels(scale, length), *heads).transpose(1, 2).flatten(0, 1)


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
AttentionInterface.register(RECORDED_FLASH, recorded_flash)
