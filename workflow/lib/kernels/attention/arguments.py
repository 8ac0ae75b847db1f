"""Arguments of a family's attention layer to its attention function, beside q, k and v.

Each function follows the arguments that it knows and refuses all others: an ignored argument would
silently be another model."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from workflow.lib.kernels.attention.flex_masks import MaskKind
from workflow.lib.system.errors import setting_error

# Arguments of Transformers' layers that add nothing to the documents' bounds, or concern caches and
# outputs.
WITHOUT_EFFECT = frozenset(
    {
        "cu_seq_lens_k",
        "max_length_k",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_router_logits",
    }
)
CHUNKED = "chunked_attention"


def check_arguments(
    module: nn.Module,
    others: Mapping[str, object],
    *,
    attention_mask: object,
    is_causal: bool | None,
    dropout: float,
    implementation: str,
    instead: str,
) -> None:
    """Raise `UserError` for arguments of a layer that the implementation cannot follow. others:
    those that it does not know; instead: a value of `model.attention` that may follow them."""
    if dropout:
        raise setting_error(
            "model.attention",
            implementation,
            f"{type(module).__name__} drops {dropout:g} of its attention weights, which "
            f"{implementation} cannot do",
            "Set it to sdpa or eager, or model.attention_dropout to 0",
        )
    bidirectional = True if is_causal is False else None
    named = {**others, "attention_mask": attention_mask, "is_causal": bidirectional}
    unknown = {name for name, value in named.items() if value is not None} - WITHOUT_EFFECT
    if unknown:
        raise setting_error(
            "model.attention",
            implementation,
            f"{type(module).__name__} asks its attention for {', '.join(sorted(unknown))}, which "
            f"{implementation} cannot do, and the model would be trained without",
            f"Set it to {instead}",
        )


def refuse_without_documents(module: nn.Module, *, implementation: str) -> NoReturn:
    """Raise `UserError`: a layer does not pass the bounds of documents to its attention."""
    raise setting_error(
        "model.attention",
        implementation,
        f"the layers of {type(module).__name__} do not tell their attention where documents begin",
        "Set it to sdpa",
    )


def attention_flop(query: torch.Tensor, value: torch.Tensor, *, keys: float) -> float:
    """Return the FLOP of attention; keys: how many a query (..., head_dim) sees on average."""
    return 2.0 * query.numel() * (1 + value.shape[-1] / query.shape[-1]) * keys


def mask_kind(module: nn.Module, sliding_window: int | None) -> MaskKind:
    """Return the limits of a layer's attention besides order and documents. Layers pass windows,
    but chunks (Llama 4) are in the config alone: stock attention has them in its mask."""
    config: Any = getattr(module, "config", None)
    kinds: Any = getattr(config, "layer_types", None)
    chunked = kinds and kinds[module.layer_idx] == CHUNKED
    return MaskKind(sliding_window, config.attention_chunk_size if chunked else None)
