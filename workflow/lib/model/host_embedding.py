"""An embedding without a table on the device: the rows that a micro-batch needs are looked up
elsewhere.

The model family's own embedding still runs, on a table of just these rows: so what it does besides
the lookup (Gemma multiplies) is done. `StoredRows` takes them from the checkpoint's file, which is
mapped into memory: no GPU memory, no traffic between GPUs, and one copy in the page cache for all
processes of a machine, which the kernel may drop.
"""

from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from workflow.lib.model.nf4_model import checkpoint_name
from workflow.lib.model.safetensors_reader import CheckpointReader
from workflow.lib.system.device_types import GPUS


def empty_table_(model: PreTrainedModel) -> None:
    """Take the table from a meta-device model's embedding, unless the head uses it too: nothing
    allocates or loads it then.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding)
    if embedding.weight is not head.weight:
        embedding.weight = nn.Parameter(embedding.weight.detach()[:0], requires_grad=False)


def embed_rows(embedding: nn.Module, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return what the family's embedding makes (*shape, hidden) of the rows (n, hidden) of n tokens
    in the form `shape`.
    """
    assert isinstance(embedding, nn.Embedding)
    # It matters to gradients of the table alone, and this one has no such row.
    embedding.padding_idx = None
    indices = torch.arange(len(rows), device=rows.device).view(shape)
    embedded: torch.Tensor = functional_call(embedding, {"weight": rows}, (indices,))
    return embedded


class StoredRows:
    """Rows of a model's embedding in its checkpoint, on `device` in the type `dtype`."""

    def __init__(
        self, model: PreTrainedModel, base: Path, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        embedding = model.get_input_embeddings()
        (path,) = [name for name, module in model.named_modules() if module is embedding]
        with CheckpointReader(base) as reader:
            self._table = reader.tensor(checkpoint_name(f"{path}.weight"))  # mapped, not read
        self._device, self._dtype = device, dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, hidden) of ids (n,)."""
        return self.on_host(ids.cpu()).to(self._device, non_blocking=True)

    def on_host(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, hidden) of ids (n,), both in host memory; page-locked if the device
        is a GPU.
        """
        rows = torch.empty(
            len(ids),
            self._table.shape[1],
            dtype=self._dtype,
            pin_memory=self._device.type in GPUS,
        )
        if self._table.dtype == self._dtype:
            torch.index_select(self._table, 0, ids, out=rows)
        else:
            rows.copy_(self._table.index_select(0, ids))
        return rows
