"""The tensors of one forward pass of training."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from workflow.lib.kernels.attention.shared_prompts import SharedPrompts
from workflow.lib.model.documents import Documents


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows, and the tokens that are predicted in them. All tensors of ids are int64.
    input_ids, position_ids: (rows, seq_len); a position 0 starts a document, which attention does
    not leave. positions: (trained tokens,), into the flattened (rows * seq_len) hidden states.
    targets: (trained tokens,), the tokens predicted there. bounds:
    `attention.packed.document_bounds(position_ids)`, found in host memory: on a device they would
    have to be waited for. embedded: the tokens' embedding rows (rows * seq_len, hidden), where they
    are looked up outside of the model. row_keys: (rows,) of what the adapters' dropout draws from;
    None where nothing is dropped. documents: those of the bounds, for recurrent layers; None where
    a model has none, or where they are to be found out from the positions, for which the device has
    to be waited for. lengths: (rows,) tokens of each row before its padding; None where nobody
    asks. weights: (trained tokens,) fp32, of each in the loss; None = 1.

    Of objectives beside supervised training, else None. firsts: (examples,), the documents that are
    the first of the two of an example. desirable: (examples,) bool. reference: (trained tokens,)
    fp32, log p of each by the reference. teacher_ids: (trained tokens, k), the teacher's likeliest
    tokens. teacher_log_probs: (trained tokens, k + 1) fp32, of these and of all others together.
    shared: keys of documents that go on in the prompt of the one before, from a position above 0.
    step_sizes, estimate: of the whole step, fp32 (`Objective`)."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    bounds: tuple[torch.Tensor, int]
    embedded: torch.Tensor | None = None
    row_keys: torch.Tensor | None = None
    documents: Documents | None = None
    lengths: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    firsts: torch.Tensor | None = None
    desirable: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_log_probs: torch.Tensor | None = None
    step_sizes: torch.Tensor | None = None
    shared: SharedPrompts | None = None
    estimate: torch.Tensor | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the same on `device`; from page-locked memory without waiting."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "MicroBatch":
        return self.each(torch.Tensor.pin_memory)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """Return the same of changed tensors."""

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return change(value[0]), value[1]
            if isinstance(value, Documents | SharedPrompts):
                return value.each(change)
            return None if value is None else change(value)

        return MicroBatch(
            **{field.name: changed(getattr(self, field.name)) for field in fields(self)}
        )
