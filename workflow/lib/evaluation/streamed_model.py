"""The held-out loss of a model that is larger than memory: one decoder layer has weights at a time.

All documents go through a layer before the next one is read, so the weights are read once. Answers
and tasks would read them once a token, so of such a model nothing else is measured."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from workflow.lib.data.tokens.token_store import Document
from workflow.lib.model.nf4_model import build_on_meta
from workflow.lib.model.published.converted_reader import ConvertedReader
from workflow.lib.quantization.calibration import document_losses, first_hidden
from workflow.lib.quantization.layer_stream import Batch, LayerStream
from workflow.lib.system.progress import Progress

# Documents that go through the layers together; their hidden states lie in host memory.
DOCUMENTS_AT_ONCE = 512


class StreamedModel:
    """A model that is read layer by layer, as often as `losses` is called.

    moved: called for every document and layer."""

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: str | None = None,
    ) -> None:
        """attention: the implementation; None: what stock Transformers has for the family."""
        self._folder, self._device, self._dtype = folder, device, dtype
        self._attention = attention
        self.moved: Callable[[], None] = lambda: None

    def losses(self, documents: Sequence[Document]) -> list[tuple[float, int]]:
        """Return (summed -log p in nats, predicted tokens) of each document, in order."""
        parts = range(0, len(documents), DOCUMENTS_AT_ONCE)
        return [
            loss
            for start in parts
            for loss in self._losses(documents[start : start + DOCUMENTS_AT_ONCE])
        ]

    @torch.no_grad()
    def _losses(self, documents: Sequence[Document]) -> list[tuple[float, int]]:
        batches = [self._batch(document) for document in documents]
        model = build_on_meta(self._folder, dtype=self._dtype)
        with ConvertedReader(self._folder, model) as reader:
            stream = LayerStream(
                self._folder,
                reader,
                device=self._device,
                dtype=self._dtype,
                attention=self._attention,
            )
            stream.record(batches)
            hidden = [first_hidden(batch) for batch in batches]
            with Progress("held-out loss", total=len(stream.layers), unit="layers") as progress:
                for number in range(len(stream.layers)):
                    hidden = self._through_layer(stream, number, batches, hidden)
                    progress.add(1)
            sums = document_losses(stream, batches, hidden)
        counts = [int(mask.sum()) for _, mask in documents]
        return list(zip(sums, counts, strict=True))

    def _through_layer(
        self,
        stream: LayerStream,
        number: int,
        batches: Sequence[Batch],
        hidden: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        after = []
        with stream.loaded(number):
            for batch, states in zip(batches, hidden, strict=True):
                after.append(stream.run(number, batch, states.to(self._device)).cpu())
                self.moved()
        return after

    def _batch(self, document: Document) -> Batch:
        ids, mask = (torch.from_numpy(np.array(part)[None]) for part in document)
        return Batch(ids.long().to(self._device), None, counted=mask.to(self._device))
