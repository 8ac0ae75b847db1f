"""An embedding without a table on the device: rows are looked up in the checkpoint's file.

The family's own embedding still runs, on a table of just these rows (Gemma multiplies). The file is
mapped: no GPU memory, no traffic, one copy in the page cache of a machine."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from workflow.lib.checkpoints.safetensors_reader import CheckpointReader
from workflow.lib.model.nf4_model import checkpoint_name
from workflow.lib.system.device_types import GPUS

Rows = Callable[[torch.Tensor], torch.Tensor]


def empty_table_(model: PreTrainedModel) -> None:
    """Remove the table of a meta embedding, unless it is the head: nothing allocates it then."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    if embedding.weight is not head.weight:
        embedding.weight = nn.Parameter(embedding.weight.detach()[:0], requires_grad=False)


class LookedUp:
    """Mixin for a table's class that looks up rows (n, width) of ids (n,) outside the table."""

    family: nn.Embedding
    rows_of: Rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the family's output for the rows (*ids.shape, width)."""
        rows = self.rows_of(ids.flatten())
        indices = torch.arange(len(rows), device=rows.device).view(ids.shape)
        embedded: torch.Tensor = functional_call(self.family, {"weight": rows}, (indices,))
        return embedded


def look_up_elsewhere_(table: nn.Embedding, rows_of: Rows) -> None:
    """Make a table take its rows from a callable; the family's embedding runs on these rows."""
    family, kind = copy(table), type(table)  # buffers stay those of the table
    family._parameters = {"weight": nn.Parameter(torch.empty(0, 0), requires_grad=False)}
    family.padding_idx = None  # it matters to gradients of the table alone
    mixed: dict[str, Any] = {"family": family, "rows_of": rows_of}
    table.__class__ = type(kind.__name__, (LookedUp, kind), mixed)


def other_tables(model: PreTrainedModel) -> list[nn.Embedding]:
    """Return a decoder's tables beside its embedding, for its layers (Gemma 3n, 4)."""
    embedding = model.get_input_embeddings()
    tables = [m for m in model.get_decoder().modules() if isinstance(m, nn.Embedding)]
    return [table for table in tables if table is not embedding]


def with_embeddings(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs with embeddings in place of ids for a decoder with several tables: the code
    around the decoder (Gemma 4's) would read the tables' weights itself."""
    decoder: Any = model.get_decoder()
    if not getattr(decoder, "hidden_size_per_layer_input", 0):
        return inputs
    others = dict(inputs)
    ids = others.pop("input_ids")
    rows = {
        "inputs_embeds": model.get_input_embeddings()(ids),
        "per_layer_inputs": decoder.get_per_layer_inputs(ids),
    }
    return others | rows


class StoredRows:
    """Rows of a model's embedding in its checkpoint, on `device` in the type `dtype`."""

    def __init__(
        self,
        model: PreTrainedModel,
        base: CheckpointReader,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        embedding = model.get_input_embeddings()
        (path,) = [name for name, module in model.named_modules() if module is embedding]
        self._table = base.tensor(checkpoint_name(f"{path}.weight"))  # mapped, not read
        self._device, self._dtype = device, dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, hidden) of ids (n,)."""
        return self.on_host(ids.cpu()).to(self._device, non_blocking=True)

    def on_host(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, hidden) of ids (n,), both on the host; page-locked for a GPU."""
        rows = torch.empty(
            len(ids), self._table.shape[1], dtype=self._dtype, pin_memory=self._device.type in GPUS
        )
        if self._table.dtype == self._dtype:
            torch.index_select(self._table, 0, ids, out=rows)
        else:
            rows.copy_(self._table.index_select(0, ids))
        return rows
