"""The tensors of one forward pass of training."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from workflow.lib.kernels.attention.head_exchange import RowCut
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts
from workflow.lib.model.documents import Documents
from workflow.lib.objectives.objective import TokensOfBatch


@dataclass(frozen=True, kw_only=True)
class MicroBatch(TokensOfBatch):
    """Packed rows and their predicted tokens. `positions` index the flattened (rows * seq_len)
    hidden states. `bounds` are `attention.packed.document_bounds(position_ids)`, computed in host
    memory: for a device the host would wait. With a `cut` tokens are those of a process's slices;
    bounds are those of whole rows."""

    input_ids: torch.Tensor  # (rows, seq_len)
    position_ids: torch.Tensor
    """(rows, seq_len); a position 0 starts a document; attention stays within documents."""
    embedded: torch.Tensor | None = None
    """(rows * seq_len, hidden), embedding rows from outside of the model."""
    row_keys: torch.Tensor | None = None
    """(rows,) keys of the adapters' dropout; None without dropout."""
    documents: Documents | None = None
    """Of the bounds, for recurrent layers; None without such layers, or if they are to be computed
    from the positions, for which the host waits."""
    lengths: torch.Tensor | None = None
    """(rows,) tokens of each row before its padding; None if unused."""
    shared: SharedPrompts | None = None
    """Keys of documents that continue the prompt of the one before, from a position above 0."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the same on `device`; from page-locked memory without waiting."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "MicroBatch":
        return self.each(torch.Tensor.pin_memory)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """Return the same with `change` applied to its tensors."""

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return change(value[0]), value[1]
            if isinstance(value, Documents | RowCut | SharedPrompts):
                return value.each(change)
            return None if value is None else change(value)

        return MicroBatch(**{x.name: changed(getattr(self, x.name)) for x in fields(self)})
