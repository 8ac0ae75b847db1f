"""LongRoPE (arXiv 2402.13753) of each document by its own length.

Transformers' rotary embedding takes the long factors for all positions of a batch as soon as one is
beyond the original context (`dynamic_rope_update`, 5.23). So a short document would be rotated
otherwise beside a long one, or beside a long padding tail, than alone. Here the family's own module
is asked twice: for the long documents alone, and for the others.

Dynamic NTK scaling needs none of this: it leaves positions up to max_position_embeddings alone, and
rows are no longer than that.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"


class RotaryByDocument(nn.Module):
    """Takes the place of a family's rotary embedding, and calls it."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *layer_type: str, **named: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine (rows, seq_len, width) in the type of x.

        position_ids: (rows, seq_len), from 0 in each document; layer_type: as the family has it.
        """
        limit = short_positions(self.original, *layer_type, *named.values())
        if limit is None or position_ids.shape[1] <= limit:
            tables: tuple[torch.Tensor, torch.Tensor] = self.original(
                x, position_ids, *layer_type, **named
            )
            return tables
        is_long = document_lengths(position_ids) > limit
        short, long = (
            self.original(x, position_ids.masked_fill(left_out, 0), *layer_type, **named)
            for left_out in (is_long, ~is_long)
        )
        cos, sin = (
            torch.where(is_long[..., None], table, other)
            for table, other in zip(long, short, strict=True)
        )
        return cos, sin

    def know_long_factors_(self, device: torch.device) -> None:
        """Give the family's module its long factors, which it makes of numbers at its first call:
        a device that only records cannot take these.
        """
        kinds: Any = self.original.rope_type
        for layer_type in kinds if isinstance(kinds, dict) else [None]:
            limit = short_positions(self.original, layer_type)
            if limit is None:
                continue
            factors, _ = ROPE_INIT_FUNCTIONS[LONGROPE](
                self.original.config, torch.device("cpu"), seq_len=limit + 1, layer_type=layer_type
            )
            name = "long_inv_freq" if layer_type is None else f"{layer_type}_long_inv_freq"
            setattr(self.original, name, factors.to(device))


def rotate_by_document_(model: PreTrainedModel) -> None:
    """Put a `RotaryByDocument` in the place of every rotary embedding that has LongRoPE."""
    for path, module in list(model.named_modules()):
        kinds: Any = getattr(module, "rope_type", None)
        if LONGROPE in (kinds.values() if isinstance(kinds, dict) else [kinds]):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, RotaryByDocument(module))


def short_positions(rotary: Any, layer_type: str | None = None) -> int | None:
    """Return the positions up to which a rotary embedding takes its short factors for layers of
    this type; None without LongRoPE.
    """
    kind, parameters = rotary.rope_type, rotary.config.rope_parameters
    if layer_type is not None:
        kind, parameters = kind[layer_type], parameters[layer_type]
    return int(parameters["original_max_position_embeddings"]) if kind == LONGROPE else None


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the tokens (rows, seq_len) of each token's document.

    position_ids: (rows, seq_len); a 0 starts a document, and every row starts with one.
    """
    length = position_ids.shape[1]
    places = torch.arange(length, device=position_ids.device)
    starts = torch.where(position_ids == 0, places, length)
    following = nn.functional.pad(starts[:, 1:], (0, 1), value=length)
    ends = following.flip(1).cummin(dim=1).values.flip(1)
    return ends - (places - position_ids)
