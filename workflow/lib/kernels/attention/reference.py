"""The family's own eager attention and masks, for comparison before the first step.

A layer must also pass its mask's window (perhaps longer than the compared documents) to its
attention, as some implementations get no mask."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import eager_mask

from workflow.lib.kernels.attention.arguments import mask_kind
from workflow.lib.kernels.attention.attention_choice import FLEX, VARLEN
from workflow.lib.system.errors import UserError

REFERENCE = "workflow_reference"
REACH = "workflow_reach"  # of a mask: tokens of its window or chunk; None without one
WITHOUT_MASK = frozenset({VARLEN, FLEX, "flash_attention_2", "flash_attention_3"})


@contextmanager
def attending_by_reference(config: PreTrainedConfig) -> Iterator[None]:
    """Within the block the layers of this config use their family's eager attention. Raises
    `UserError` if a layer does not pass its mask's window to an attention that gets no mask."""
    usual = config._attn_implementation
    assert usual is not None, "models are built with an attention"
    config._attn_implementation = REFERENCE
    config.workflow_told_alone = usual in WITHOUT_MASK
    try:
        yield
    finally:
        config._attn_implementation = usual
        del config.workflow_told_alone


def reference_mask(
    *positional: Any, local_size: int | None = None, **named: Any
) -> torch.Tensor | None:
    """Return eager attention's mask, with the attribute `REACH`."""
    mask: torch.Tensor | None = eager_mask(*positional, **named)
    if mask is not None:
        setattr(mask, REACH, local_size)
    return mask


def reference_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the family's eager attention; raises `UserError` if the mask has another window."""
    config: Any = module.config
    kind = mask_kind(module, sliding_window)
    reach = getattr(attention_mask, REACH, kind.window or kind.chunk)
    if config.workflow_told_alone and reach != (kind.window or kind.chunk):
        raise UserError(
            f"{type(module).__name__} masks what is beyond {reach} tokens, and tells its attention "
            f"{kind.window or kind.chunk}, so it would be trained with another mask. "
            "Set model.attention to sdpa."
        )
    eager = getattr(module, "_eager", None) or vars(sys.modules[type(module).__module__]).get(
        "eager_attention_forward"
    )
    if eager is None:
        raise UserError(
            f"{type(module).__name__} has no attention of its own that others could be compared "
            "with. Choose another model.source."
        )
    output: tuple[torch.Tensor, torch.Tensor | None] = eager(
        module, query, key, value, attention_mask, sliding_window=sliding_window, **options
    )
    return output


AttentionInterface.register(REFERENCE, reference_attention)
AttentionMaskInterface.register(REFERENCE, reference_mask)
