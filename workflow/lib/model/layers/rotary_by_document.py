"""Rotary embeddings whose frequencies depend on each document's length, not on the batch's.

Transformers' module reads the batch's largest position from the device (`dynamic_rope_update`,
5.17), which no CUDA graph can hold, and LongRoPE (arXiv 2402.13753) then takes its long factors for
all documents. Here copies of the family's module have fixed frequencies: one for long documents,
one for others. Dynamic NTK scaling has frequencies for every length beyond max_position_embeddings.
Training rows are never longer; for held-out documents a copy takes each token's own frequencies."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE, DYNAMIC, FIXED = "longrope", "dynamic", "default"


class RotaryByDocument(nn.Module):
    """Replaces a family's rotary embedding, and calls copies of it."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self._copies: dict[torch.device, tuple[nn.Module, nn.Module]] = {}

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *layer_type: str, **named: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine (rows, seq_len, width) in x's type, for positions from 0."""
        short, long = self.copies(x.device)
        tables: tuple[torch.Tensor, torch.Tensor] = short(x, position_ids, *layer_type, **named)
        layer_type_name = next(iter((*layer_type, *named.values())), None)
        kind, limit = changes_beyond(self.original, layer_type_name)
        if limit is None or position_ids.shape[1] <= limit:
            return tables
        lengths = document_lengths(position_ids)
        if kind == LONGROPE:
            others = long(x, position_ids, *layer_type, **named)
        else:
            others = self._by_length(x, position_ids, lengths, layer_type_name)
        cos, sin = (
            torch.where((lengths > limit)[..., None], other, table)
            for table, other in zip(tables, others, strict=True)
        )
        return cos, sin

    def _by_length(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        lengths: torch.Tensor,
        layer_type: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables by dynamic NTK scaling for `lengths` (rows, seq_len)."""
        fixed, _ = self.copies(x.device)
        named = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, _ = ROPE_INIT_FUNCTIONS[DYNAMIC](
            self.original.config, x.device, seq_len=lengths[..., None], **named
        )

        def token_table(
            own: torch.Tensor, position: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            buffers = {_frequencies_of(layer_type): own}
            cos, sin = functional_call(fixed, buffers, (x, position.view(1, 1)), named)
            return cos[0, 0], sin[0, 0]

        cos, sin = torch.vmap(token_table)(frequencies.flatten(0, 1), position_ids.flatten())
        return cos.unflatten(0, position_ids.shape), sin.unflatten(0, position_ids.shape)

    def copies(self, device: torch.device) -> tuple[nn.Module, nn.Module]:
        """Return the family's module with the frequencies of short, and of long documents; made
        once. Call it before a recording, whose device has no numbers."""
        if device not in self._copies:
            short, long = (self._fixed(device, long=long) for long in (False, True))
            self._copies[device] = short, long
        return self._copies[device]

    def _fixed(self, device: torch.device, *, long: bool) -> nn.Module:
        config: Any = self.original.config
        shared = [config, *self.original.buffers()]
        fixed = deepcopy(self.original, {id(one): one for one in shared}).to(device)
        kinds: Any = self.original.rope_type
        for layer_type in kinds if long and isinstance(kinds, dict) else [None] * long:
            kind, limit = changes_beyond(self.original, layer_type)
            if kind == LONGROPE and limit is not None:
                frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](
                    config, torch.device("cpu"), seq_len=limit + 1, layer_type=layer_type
                )
                setattr(fixed, _frequencies_of(layer_type), frequencies.to(device))
        by_type = isinstance(kinds, dict)
        fixed.rope_type = dict.fromkeys(kinds, FIXED) if by_type else FIXED  # type: ignore[assignment]
        return fixed


def rotate_by_document_(model: PreTrainedModel) -> None:
    """Replace every rotary embedding that depends on lengths by a `RotaryByDocument`."""
    for path, module in list(model.named_modules()):
        if rotates_by_length(module):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, RotaryByDocument(module))


def rotates_by_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding that depends on lengths."""
    kinds: Any = getattr(module, "rope_type", None)
    several = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind in (LONGROPE, DYNAMIC) for kind in several)


def changes_beyond(rotary: Any, layer_type: str | None = None) -> tuple[str, int | None]:
    """Return the kind of a rotary embedding for layers of this type, and the document length up to
    which its frequencies are constant; None: any length."""
    kind, parameters = rotary.rope_type, rotary.config.rope_parameters
    if layer_type is not None:
        kind, parameters = kind[layer_type], parameters[layer_type]
    return kind, length_limit(kind, parameters, rotary.config)


def length_limit(kind: str, parameters: Mapping[str, Any], config: Any) -> int | None:
    """Return the length up to which frequencies of this kind are constant; None: any length."""
    if kind == LONGROPE:
        return int(parameters["original_max_position_embeddings"])
    return int(config.max_position_embeddings) if kind == DYNAMIC else None


def _frequencies_of(layer_type: str | None) -> str:
    return "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"


def document_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Return each token's document length (rows, seq_len); a position 0 starts a document."""
    length = position_ids.shape[1]
    indices = torch.arange(length, device=position_ids.device)
    starts = torch.where(position_ids == 0, indices, length)
    following = nn.functional.pad(starts[:, 1:], (0, 1), value=length)
    ends = following.flip(1).cummin(dim=1).values.flip(1)
    return ends - (indices - position_ids)
