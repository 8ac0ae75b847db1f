"""Attention over packed rows by torch's `flex_attention` (arXiv 2412.05496): soft caps, sinks,
chunks, and values narrower than keys, which torch's FlashAttention lacks.

On a GPU the kernel is compiled at its first use for each shape of rows (about 5 s); it makes no
tensor of S x S elements. The mask is data (`flex_masks`). CPUs compute all scores of a layer, as
torch's kernel has no backward there.

Gemma 2 27B, 2 rows of 3,072 tokens, forward and backward on an H100: 1.9 ms, eager 20.3, varlen
without the cap 1.5 (torch 2.11, November 2026). Within 0.5% of fp32 (eager in bf16: 4.5%), bit for
bit the same in each run. Other tiles and TMA are not faster; ROWS_GUARANTEED_SAFE gives NaN in rows
whose first block belongs to other rows."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import config as compiler
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from transformers import AttentionInterface

from workflow.lib.kernels.attention.arguments import (
    attention_flop,
    check_arguments,
    mask_kind,
    refuse_without_documents,
)
from workflow.lib.kernels.attention.attention_choice import FLEX
from workflow.lib.kernels.attention.flex_masks import PackedMasks
from workflow.lib.kernels.attention.head_exchange import over_whole_rows
from workflow.lib.kernels.kernel_launch import launch
from workflow.lib.system.device_types import RECORDED

Attend = Callable[..., torch.Tensor]
MOST_KERNELS = 64


def flex_arguments(
    position_ids: torch.Tensor, longest: int | None = None
) -> dict[str, PackedMasks]:
    """Return the arguments that Transformers' layers pass to `flex_attention`, for a micro-batch.
    position_ids: (rows, seq_len); a 0 starts a document, and every row starts with one. longest:
    tokens of the longest document, for recordings."""
    return {"packed_masks": PackedMasks(position_ids, longest)}


@over_whole_rows
def flex_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    packed_masks: PackedMasks | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents, in the form of Transformers' attention functions.

    query: (rows, heads, seq_len, head_dim); key, value: with key_value_heads, which divide heads,
    and value's own width. softcap: scores become softcap * tanh(scores / softcap). s_aux: (heads,),
    one more score of each query, which takes its share of the weights and has no value. Returns
    (rows, seq_len, heads, value_dim), contiguous, and no weights. Raises `UserError` if the model
    tells it to do anything else."""
    check_arguments(
        module, others, attention_mask=attention_mask, is_causal=is_causal, dropout=dropout,
        implementation=FLEX, instead="eager",
    )  # fmt: skip
    if packed_masks is None:
        refuse_without_documents(module, implementation=FLEX)
    kind = mask_kind(module, sliding_window)
    arguments: dict[str, Any] = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": softcap,
        "sinks": s_aux,
    }
    if query.device.type == "cpu":
        output = all_scores(query, key, value, packed_masks.first_keys(kind), **arguments)
        return output.contiguous(), None
    mask = packed_masks.block_mask(kind)
    if query.device.type == RECORDED:
        keys = packed_masks.seen_keys(kind)
        return allocate_like_kernel(query, key, value, s_aux, keys).contiguous(), None
    return _compiled()(query, key, value, mask, **arguments).contiguous(), None


@functools.cache
def _compiled() -> Attend:
    """Return `blockwise`, compiled; raises where compilation is off, never slower eager code (the
    stages' variable that switches compilers off is read here). A kernel serves one shape of rows
    and heads; torch stops at 8 kernels, and held-out rows may need more."""
    compiler.recompile_limit = MOST_KERNELS
    switched_off = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    try:
        return torch.compile(blockwise, fullgraph=True)
    finally:
        if switched_off is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = switched_off


def blockwise(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention (rows, seq_len, heads, value_dim), block by block; only compiled. With the
    sum Z of the exponentials of a query's scores, lse = log Z, a sink s takes e^s of Z + e^s, so
    the others keep Z / (Z + e^s) = sigmoid(lse - s). One kernel for all lengths: that for decoding,
    which torch takes for rows below 128 tokens, does not compile for a second shape of rows (2.11:
    "No choices to select")."""
    assert torch.compiler.is_compiling(), "TORCH_COMPILE_DISABLE is set: all scores would be made"
    output, statistics = torch_flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options={"BACKEND": "TRITON"},
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        assert statistics.lse is not None, "it was asked for"
        share = torch.sigmoid(statistics.lse - sinks.float()[:, None])
        output = (output * share[..., None]).to(value.dtype)
    return output.transpose(1, 2)


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def all_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the same by all scores (rows, heads, seq_len, seq_len); first: `first_keys`."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(query.shape[2], device=query.device)
    seen = (positions <= positions[:, None]) & (positions >= first[:, None, :, None])
    scores = scores.masked_fill(~seen, float("-inf")).float()
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1).to(value.dtype)[..., : query.shape[2]]
    return (weights @ value).transpose(1, 2)


def allocate_like_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    keys: float,
) -> torch.Tensor:
    """Allocate the memory of the compiled kernel without computing, for recordings, whose device
    cannot compile. Arguments and result as in `flex_attention`; keys: seen by a query, on average.

    As torch 2.11 compiles it, measured on an H200: two numbers a query in forward, of which one is
    kept; in backward one more, and gradients of as many heads as there are. Results have the
    strides of the queries. With sinks their factor follows the kernel: one more output in forward
    and one more gradient in backward, not measured on a GPU."""
    output: torch.Tensor = _Kernel.apply(query, key, value, keys)  # type: ignore[no-untyped-call]
    if sinks is not None:
        output = _Sinks.apply(output, sinks)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: float
    ) -> torch.Tensor:
        order = sorted(range(4), key=query.stride, reverse=True)
        shape = (*query.shape[:-1], value.shape[-1])
        output = torch.empty_permuted(shape, order, dtype=value.dtype, device=value.device)
        log_sums, _ = _per_query(query), _per_query(query)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.flop = attention_flop(query, value, keys=keys)
        launch("flex_attention.forward", (), output, query, key, value, flop=ctx.flop)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, _ = ctx.saved_tensors
        _products = _per_query(query)  # of gradient and output, while the kernel runs
        grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        inputs = (grad, query, key, value, output)
        launch("flex_attention.backward", (), *grads, *inputs, flop=2.5 * ctx.flop)
        return *grads, None


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(output, sinks)
        return torch.empty_like(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, sinks = ctx.saved_tensors
        return torch.empty_like(output), torch.empty_like(sinks)


def _per_query(query: torch.Tensor) -> torch.Tensor:
    """Return one fp32 number for each query and head."""
    return query.new_empty(query.shape[:-1], dtype=torch.float32)


AttentionInterface.register(FLEX, flex_attention)
