"""What a family's attention layer tells its attention function, beside queries, keys and values.

Each function follows what it knows and refuses the rest: an argument that is passed over would be
another model, without a word."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from workflow.lib.kernels.attention.flex_masks import MaskKind
from workflow.lib.system.errors import setting_error

# What Transformers' layers hand on that says nothing beyond the documents' bounds, or is about
# caches and outputs.
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


def refuse_others(
    module: nn.Module, arguments: Mapping[str, object], *, implementation: str, instead: str
) -> None:
    """Raise `UserError` if one of the arguments is given that the implementation has no way to
    follow. instead: the value of `model.attention` that may do it."""
    given = {name for name, value in arguments.items() if value is not None}
    unknown = given - WITHOUT_EFFECT
    if unknown:
        raise setting_error(
            "model.attention",
            implementation,
            f"{type(module).__name__} asks its attention for {', '.join(sorted(unknown))}, which "
            f"{implementation} cannot do, and the model would be trained without",
            f"Set it to {instead}",
        )


def refuse_dropout(module: nn.Module, dropout: float, *, implementation: str) -> None:
    """Raise `UserError` if a layer is to drop attention weights, which cannot be done."""
    if dropout:
        raise setting_error(
            "model.attention",
            implementation,
            f"{type(module).__name__} drops {dropout:g} of its attention weights, which "
            f"{implementation} cannot do",
            "Set it to sdpa or eager, or model.attention_dropout to 0",
        )


def refuse_without_documents(module: nn.Module, *, implementation: str) -> NoReturn:
    """Raise `UserError`: a layer was told where documents begin, and does not hand it on."""
    raise setting_error(
        "model.attention",
        implementation,
        f"the layers of {type(module).__name__} do not tell their attention where documents begin",
        "Set it to sdpa",
    )


def attention_flop(query: torch.Tensor, value: torch.Tensor, *, keys: float) -> float:
    """Return the FLOP of attention where a query (..., head_dim) sees so many keys on average."""
    return 2.0 * query.numel() * (1 + value.shape[-1] / query.shape[-1]) * keys


def mask_kind(module: nn.Module, sliding_window: int | None) -> MaskKind:
    """Return what limits the attention of a layer besides order and documents. A window is told by
    the layer, a chunk (Llama 4) by the config alone: stock implementations get it in their mask."""
    config: Any = getattr(module, "config", None)
    kinds: Any = getattr(config, "layer_types", None)
    chunked = kinds and kinds[module.layer_idx] == CHUNKED
    return MaskKind(sliding_window, config.attention_chunk_size if chunked else None)
