"""Recurrent layers of packed rows: their state begins anew with every document.

Linear attention, state spaces and short convolutions run along a whole row, whatever the positions
say. A module that has a convolution over tokens is such a layer; it is given a subclass of its own
class (as FSDP2 gives its units) whose forward calls the family's code with one document a row. What
it computes with is the family's: its torch code, or the kernels of `flash-linear-attention` and
`causal-conv1d` where Transformers has found them.

Documents of similar length go together, filled up at their ends to the longest. All these layers
are causal, so nothing of a document depends on what follows it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.decoder_layers import decoder_layers
from workflow.lib.model.layers.adapter_state import AdapterState
from workflow.lib.model.layers.flex_attention import flex_arguments
from workflow.lib.model.layers.packed_attention import flash_arguments
from workflow.lib.system.errors import UserError

# The bounds of documents for attention, which sees the rows as they are packed.
OF_PACKED_ROWS = {*flash_arguments(torch.empty(0), 0), *flex_arguments(torch.zeros(1, 1))}


@dataclass(frozen=True)
class Documents:
    """How packed rows are taken apart into documents, and put together again.

    groups: for each group of documents of similar length, the tokens (documents, longest) by their
    place in the flattened rows (a document's last token again where it is shorter), and which of
    them are the document's. order: of the groups' tokens one behind the other, the place that holds
    token 0, 1, ... of the flattened rows.
    """

    groups: list[tuple[torch.Tensor, torch.Tensor]]
    order: torch.Tensor
    tokens: int
    """In a row."""

    def apart(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return a tensor of the packed rows (1 or rows, tokens, ...) by group: (documents,
        longest, ...).
        """
        count = len(self.order) // self.tokens
        flat = x.expand(count, *x.shape[1:]).flatten(0, 1)
        return [flat[places] for places, _ in self.groups]

    def together(self, parts: list[torch.Tensor], rows: torch.Size) -> torch.Tensor:
        """Return what a layer has made of each group as packed rows (*rows, ...)."""
        pairs = zip(parts, self.groups, strict=True)
        whole = torch.cat([part[own] for part, (_, own) in pairs])[self.order]
        return whole.view(*rows, *whole.shape[1:])


def documents_of(position_ids: torch.Tensor) -> Documents | None:
    """Return the documents of packed rows (rows, tokens); None if each row is one document.

    A position 0 starts a document. The lengths are needed on the host, which waits for them.
    """
    rows, tokens = position_ids.shape
    starts = (position_ids.flatten() == 0).nonzero().flatten().tolist()
    starts = sorted({*starts, *range(0, rows * tokens, tokens)})
    if len(starts) == rows:
        return None
    by_size: dict[int, list[range]] = {}
    for start, stop in zip(starts, [*starts[1:], rows * tokens], strict=True):
        # Lengths of the same number of binary digits: fewer than half of the places are filled up.
        by_size.setdefault((stop - start).bit_length(), []).append(range(start, stop))
    device = position_ids.device
    groups = [_group(documents, device) for documents in by_size.values()]
    placed = torch.cat([places[own] for places, own in groups])
    return Documents(groups, placed.argsort(), tokens)


def _group(documents: list[range], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.tensor([document.start for document in documents])[:, None]
    last = torch.tensor([document[-1] for document in documents])[:, None]
    places = first + torch.arange(max(map(len, documents)))
    return places.clamp(max=last).to(device), (places <= last).to(device)


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
        if documents is None:
            return family(hidden_states, *args, **others)
        named = {name: x for name, x in others.items() if name not in OF_PACKED_ROWS}
        divide = partial(_divided, documents, type(self).__name__)
        inputs = documents.apart(hidden_states)
        outputs = []
        for n, x in enumerate(inputs):
            given = [divide(y, n) for y in args]
            told = {name: divide(y, n) for name, y in named.items()}
            starts = documents.groups[n][0][:, 0]
            with self.adapters.rows_as(starts, tokens=len(documents.order)):
                outputs.append(family(x, *given, **told))
        rows = hidden_states.shape[:2]
        if isinstance(outputs[0], tuple):
            return documents.together([x for x, *_ in outputs], rows), *outputs[0][1:]
        return documents.together(outputs, rows)


def _divided(documents: Documents, layer: str, value: Any, number: int) -> Any:
    """Return what a layer is given for the packed rows as it is for group `number`."""
    if isinstance(value, tuple):
        return tuple(_divided(documents, layer, part, number) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() < 2 or value.shape[1] != documents.tokens:
        raise UserError(
            f"{layer} keeps a state along the row and is given a tensor of shape "
            f"{tuple(value.shape)}, which cannot be divided among the documents of a packed row. "
            "Set data.packing to false: each row is one document then."
        )
    return documents.apart(value)[number]


def separate_documents_(model: PreTrainedModel, adapters: AdapterState) -> int:
    """Let recurrent layers of a model's decoder take packed documents one by one; return how many
    there are. adapters: what the adapters in them share.
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
    if layers:
        tell = partial(_tell_documents, layers)
        model.get_decoder().register_forward_pre_hook(tell, with_kwargs=True)
    return len(layers)


def _tell_documents(
    layers: list[Any], _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    positions = named.get("position_ids")
    documents = None if positions is None else documents_of(positions)
    for layer in layers:
        layer.documents = documents
