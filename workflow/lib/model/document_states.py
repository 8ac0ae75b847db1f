"""Recurrent layers of packed rows: their state begins anew with every document.

Linear attention, state spaces and short convolutions run along a whole row, whatever the positions
say. A module that has a convolution over tokens is such a layer; it is given a subclass of its own
class (as FSDP2 gives its units) whose forward calls the family's code with one document a row
(`documents`: all these layers are causal). Which functions that code calls has been settled by then
(`fuse_layers`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.kernels.attention.flex import flex_arguments
from workflow.lib.kernels.attention.packed import flash_arguments
from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.documents import Documents
from workflow.lib.model.layers.adapter_state import AdapterState
from workflow.lib.system.errors import UserError

# The bounds of documents for attention, which sees the rows as they are packed.
OF_PACKED_ROWS = {*flash_arguments(torch.empty(0), 0), *flex_arguments(torch.zeros(1, 1))}


class OneByOne:
    """What a recurrent layer's class is mixed with; `documents` is set before each forward of the
    decoder, also to be recomputed with.
    """

    documents: Documents | None = None
    adapters = AdapterState()

    def forward(self, hidden_states: torch.Tensor, *args: Any, **others: Any) -> Any:
        """Call the family's forward with documents as rows; return what it does in packed rows."""
        family: Callable[..., Any] = super().forward  # type: ignore[misc]
        documents = self.documents
        rows = hidden_states.shape[:2]
        named = {name: x for name, x in others.items() if name not in OF_PACKED_ROWS}
        if documents is None or documents.are_rows(rows):
            return family(hidden_states, *args, **named)
        divide = partial(_divided, documents, type(self).__name__, rows[1])
        inputs, starts = documents.apart(hidden_states), documents.starts(hidden_states.device)
        outputs = []
        for n, x in enumerate(inputs):
            given = [divide(y, n) for y in args]
            told = {name: divide(y, n) for name, y in named.items()}
            with self.adapters.rows_as(starts[n], tokens=documents.tokens):
                outputs.append(family(x, *given, **told))
        return _joined(documents, outputs, inputs, rows)


def _joined(
    documents: Documents,
    outputs: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    rows: torch.Size,
) -> Any:
    """Return in packed rows what a layer made of each group of documents: all that has the tokens
    of its input; of anything else (a cache, None) the first.
    """
    if isinstance(outputs[0], tuple):
        parts = zip(*outputs, strict=True)
        return tuple(_joined(documents, part, inputs, rows) for part in parts)
    tokens = [x.shape[:2] for x in inputs]
    if [x.shape[:2] for x in outputs if isinstance(x, torch.Tensor)] == tokens:
        return documents.together(outputs, rows)
    return outputs[0]


def _divided(documents: Documents, layer: str, tokens: int, value: Any, number: int) -> Any:
    """Return what a layer is given for packed rows of so many tokens as it is for group
    `number`.
    """
    if isinstance(value, tuple):
        return tuple(_divided(documents, layer, tokens, part, number) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() < 2 or value.shape[1] != tokens:
        raise UserError(
            f"{layer} keeps a state along the row and is given a tensor of shape "
            f"{tuple(value.shape)}, which cannot be divided among the documents of a packed row. "
            "Set data.packing to false: each row is one document then."
        )
    return documents.apart(value)[number]


def separate_documents_(model: PreTrainedModel, adapters: AdapterState) -> list[nn.Module]:
    """Let recurrent layers of a model's decoder take packed documents one by one; return them.
    adapters: what the adapters in them share.
    """
    layers = [
        module
        for layer in decoder_layers(model)
        for module in layer.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    ]
    for layer in layers:
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (OneByOne, kind), {"adapters": adapters})
    return layers


def tell_documents_(layers: Sequence[Any], documents: Documents) -> None:
    """Say to recurrent layers which documents the next forward has, and its backward."""
    for layer in layers:
        layer.documents = documents
