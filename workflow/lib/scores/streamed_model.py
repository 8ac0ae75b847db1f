"""A model larger than memory, run layer by layer: one decoder layer has weights at a time.

All rows or documents pass through a layer before the next one is read, so the weights are read once
for them. Answers and tasks would read them once a token, so only log-probabilities of given text
are measured with such a model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import Document
from workflow.lib.distributed.work_sharing import shared_out
from workflow.lib.quantization.calibration import SummedLoss, document_losses
from workflow.lib.quantization.layer_stream import Batch, LayerStream
from workflow.lib.scores.scoring import HeldoutSums, Row, Scorer
from workflow.lib.scores.store import Scores
from workflow.lib.system.progress import Progress

# Documents in one pass through the layers; their hidden states are in host memory.
DOCUMENTS_AT_ONCE = 512
LOGITS_AT_ONCE = 1024  # positions


@dataclass
class StreamedModel:
    """A model that is read layer by layer at each `losses`; moved: called by document and layer."""

    source: Checkpoint
    _: KW_ONLY
    device: torch.device
    dtype: torch.dtype
    attention: str | None = None
    """The implementation; None: stock Transformers' for the family."""
    moved: Callable[[], None] = lambda: None

    def losses(
        self, documents: Sequence[Document], objective: SummedLoss | None = None
    ) -> list[HeldoutSums]:
        """Return the sums of each document, in order."""
        return [
            sums
            for start in range(0, len(documents), DOCUMENTS_AT_ONCE)
            for sums in self._losses(
                documents[start : start + DOCUMENTS_AT_ONCE],
                objective and _from(start, objective),
            )
        ]

    def _losses(
        self, documents: Sequence[Document], objective: SummedLoss | None
    ) -> list[HeldoutSums]:
        batches = [Batch.from_document(*document, self.device) for document in documents]
        with self.stream() as stream:
            with Progress("loss of texts", total=len(stream.layers), unit="layers") as progress:
                hidden = through_layers(
                    stream, batches, moved=self.moved, layer_done=lambda: progress.add(1)
                )
            nll = document_losses(stream, batches, hidden)
            own: list[Any] = [None] * len(documents)
            if objective is not None:
                own = document_losses(stream, batches, hidden, loss=objective)
        counts = [int(mask.sum()) for _, mask in documents]
        return [HeldoutSums(*sums) for sums in zip(nll, counts, own, strict=True)]

    @contextmanager
    def stream(self) -> Iterator[LayerStream]:
        """Open the model's files; tensors outside of its layers are read at once."""
        with self.source.weights() as reader:
            yield LayerStream(
                self.source,
                reader,
                device=self.device,
                dtype=self.dtype,
                attention=self.attention,
            )


def _from(start: int, objective: SummedLoss) -> SummedLoss:
    return lambda document, *tokens: objective(start + document, *tokens)


@torch.no_grad()
def through_layers(
    stream: LayerStream,
    batches: Sequence[Batch],
    *,
    moved: Callable[[], None],
    layer_done: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Return the last layer's output for each batch, in host memory; `moved` is called for every
    batch before the first layer, and in every layer."""
    hidden = []
    for batch in batches:
        hidden.append(stream.first_hidden(batch).cpu())
        moved()
    for number in range(len(stream.layers)):
        with stream.loaded(number):
            for index, batch in enumerate(batches):
                states = hidden[index].to(batch.input_ids.device)
                hidden[index] = stream.run(number, batch, states).cpu()
                moved()
        layer_done()
    return hidden


class StreamedScorer(Scorer):
    """Scores by a stream of layers, which each process reads whole."""

    def __init__(self, stream: LayerStream, **options: Any) -> None:
        """options: of `Scorer`."""
        super().__init__(**options)
        self._stream, self.attention = stream, stream.attention_of_packed

    def scores(self, rows: Sequence[Row], worked: Callable[[float], None]) -> Scores:
        def compute(mine: list[Row]) -> list[Scores]:
            if not mine:
                return []
            batches = [
                Batch(row.input_ids.to(self._device), row.position_ids.to(self._device))
                for row in mine
            ]
            steps = len(mine) * (1 + len(self._stream.layers))
            hidden = through_layers(self._stream, batches, moved=lambda: worked(1 / steps))
            return [self._row_scores(*item) for item in zip(mine, batches, hidden, strict=True)]

        return Scores.joined(shared_out(rows, compute, world=self._world))

    def _row_scores(self, row: Row, batch: Batch, hidden: torch.Tensor) -> Scores:
        states = hidden.to(self._device)
        parts = []
        for trained in row.trained.to(self._device).split(LOGITS_AT_ONCE):
            logits = self._stream.logits(batch, states, trained - 1)[0]
            targets = batch.input_ids[0, trained]
            parts.append(self._scores_of(logits, targets))
        return Scores.joined(parts)
