"""Tables of tokens beside the embedding: those of which each decoder layer gets a part of a token's
row (Gemma 3n and 4).

Where the embedding's rows are looked up outside of the model (`host_embedding`), the decoder is
given these rows, too: it has no token ids then. Where processes share the tables' rows, each table
takes its rows from all of them, and what the family does besides the lookup stays its own.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from workflow.lib.model.host_embedding import embed_rows

Rows = Callable[[torch.Tensor], torch.Tensor]


def other_tables(model: PreTrainedModel) -> list[nn.Embedding]:
    """Return the tables of a model's decoder that are not its embedding."""
    embedding = model.get_input_embeddings()
    found = [m for m in model.get_decoder().modules() if isinstance(m, nn.Embedding)]
    return [table for table in found if table is not embedding]


def layer_embeddings(decoder: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a decoder makes of its other tables, under the name by which it takes it; nothing
    if it has none.
    """
    if not getattr(decoder, "hidden_size_per_layer_input", 0):
        return {}
    return {"per_layer_inputs": decoder.get_per_layer_inputs(ids)}


class LookedUp:
    """What the class of a table is mixed with whose rows come from elsewhere."""

    family: nn.Embedding
    rows_of: Rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return what the family's table makes of the rows (*ids.shape, width)."""
        return embed_rows(self.family, self.rows_of(ids.flatten()), ids.shape)


def look_up_elsewhere_(table: nn.Embedding, rows_of: Rows) -> None:
    """Let a table take its rows (n, width) of ids (n,) from an object that is called for them."""
    family, kind = copy(table), type(table)
    family._parameters = dict(table._parameters)  # buffers stay those of the table
    mixed: dict[str, Any] = {"family": family, "rows_of": rows_of}
    table.__class__ = type(kind.__name__, (LookedUp, kind), mixed)
