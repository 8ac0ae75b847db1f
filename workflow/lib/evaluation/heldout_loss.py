"""Loss on documents through the model's own forward, as any user would measure it: on held-out ones
and on other texts.

A batch is padded on the right, which a causal model never sees. If rotation depends on a row's
length, a batch has only documents with the rotation that each has alone (`rotated_alike`). Only
positions that predict a trained token get logits, at most `LOGITS_BYTES` of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from workflow.lib.data.tokens.token_store import Document
from workflow.lib.distributed.work_sharing import is_sharded
from workflow.lib.evaluation.batch_size import batches, fitting_batch_size, halving
from workflow.lib.model.layers.rotary_by_length import rotated_alike
from workflow.lib.quantization.calibration import SummedLoss
from workflow.lib.scores.scoring import HeldoutSums, kept_logits
from workflow.lib.system.progress import Progress

# Logits of a batch at most (a document alone may exceed it); weights need more.
LOGITS_BYTES = 2**30
WHAT = "loss of texts"  # for the log
Indices = npt.NDArray[np.int64]
CHUNK_ROWS = 1024  # rows in fp32 at a time: 0.5 GiB at a 128k vocabulary


def heldout_losses(
    model: nn.Module, documents: Sequence[Document], *, batch_size: int | str, device: torch.device
) -> list[tuple[float, int]]:
    """Return (summed -log p in nats, predicted tokens) of each document, as `heldout_sums`."""
    sums = heldout_sums(model, documents, batch_size=batch_size, device=device)
    return [(document.nll, document.tokens) for document in sums]


def heldout_sums(
    model: nn.Module,
    documents: Sequence[Document],
    *,
    batch_size: int | str,
    device: torch.device,
    objective: SummedLoss | None = None,
) -> list[HeldoutSums]:
    """Return the sums of each document, in order. `batch_size` (documents, or `auto`) bounds memory
    and changes results by rounding only. All have trained tokens."""
    if not documents:
        return []
    longest = max(len(ids) for ids, _ in documents)
    start = fitting_batch_size(batch_size, config=model.config, device=device, tokens=longest)

    def with_size(size: int) -> list[HeldoutSums]:
        return _sums(model, documents, objective, batch_size=size, device=device)

    return halving(with_size, start=start, what=WHAT, collective=is_sharded(model))


def _sums(
    model: nn.Module,
    documents: Sequence[Document],
    objective: SummedLoss | None,
    *,
    batch_size: int,
    device: torch.device,
) -> list[HeldoutSums]:
    sums = [HeldoutSums(0.0, 0)] * len(documents)
    config: Any = model.config
    vocab_size = int(config.get_text_config().vocab_size)
    rows = max(1, LOGITS_BYTES // (4 * vocab_size))
    lengths = [len(ids) for ids, _ in documents]
    size: dict[str, Any] = {"total": len(documents), "total_work": sum(lengths)}
    with Progress(WHAT, unit="documents", **size) as progress:
        alike = [rotated_alike(config, length) for length in lengths]
        for batch in batches(lengths, alike, size=batch_size, most_tokens=rows):
            forward = _forward(model, [documents[number] for number in batch], device=device)
            for row, (number, nll) in enumerate(zip(batch, forward.nll(), strict=True)):
                own = objective and float(objective(number, slice(None), *forward.document(row)))
                sums[number] = HeldoutSums(nll, int(documents[number][1].sum()), own)
            progress.add(len(batch), work=sum(lengths[number] for number in batch))
    return sums


class _Forward(NamedTuple):
    """Logits (rows, columns, vocabulary), and for each trained token, by document, its row, the
    column that predicts it, and its id."""

    logits: torch.Tensor
    rows: Indices
    columns: Indices
    targets: Indices

    def nll(self) -> list[float]:
        """Return the summed -log p of each document."""
        losses = _token_losses(*self)
        return [float(total) for total in np.bincount(self.rows, weights=losses)]

    def document(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a document's logits (n, vocabulary) and targets (n,)."""
        own = self.rows == row
        columns, targets = (
            torch.from_numpy(index[own]).to(self.logits.device)
            for index in (self.columns, self.targets)
        )
        return self.logits[row, columns], targets


# FSDP gathers into the same buffers in every mode, and inference mode would mark them.
@torch.no_grad()
def _forward(model: nn.Module, documents: Sequence[Document], *, device: torch.device) -> _Forward:
    shape = (len(documents), max(len(ids) for ids, _ in documents))
    ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for row, (document_ids, document_mask) in enumerate(documents):
        assert not document_mask[0], (
            "the first token of a document has nothing to be predicted from"
        )
        ids[row, : len(document_ids)] = document_ids
        mask[row, : len(document_ids)] = document_mask
    keep = np.flatnonzero(mask[:, 1:].any(axis=0))  # positions whose logits predict a trained token
    input_ids, kept = (torch.from_numpy(array).to(device) for array in (ids, keep))
    logits = kept_logits(model, kept, input_ids=input_ids, use_cache=False)
    rows, columns = np.nonzero(mask[:, keep + 1])
    return _Forward(logits, rows, columns, targets=ids[rows, keep[columns] + 1])


def _token_losses(
    logits: torch.Tensor, rows: Indices, columns: Indices, targets: Indices
) -> npt.NDArray[np.float64]:
    """Return -log softmax(logits[row, column])[target] of each triple, in fp32 by chunks."""
    triples = [torch.from_numpy(index).to(logits.device) for index in (rows, columns, targets)]
    parts = [
        nn.functional.cross_entropy(logits[row, column].float(), target, reduction="none").cpu()
        for row, column, target in zip(*(torch.split(x, CHUNK_ROWS) for x in triples), strict=True)
    ]
    return np.asarray(torch.cat(parts).double().numpy())
