"""What 4 bits cost of the loss, by weight: a diagonal Fisher estimate from a layer stream.

A weight's share of the cost is that of sum_r |g_r * dw|^2, over rows of text r: g_r is the gradient
of a row's summed loss in the original model, dw what NF4 (absmax) changes. The cost of all together
is measured, because the estimate is several times too large. A forward pass stores the states
between layers in host memory; then each layer runs again from the last to the first, for its
gradients. A whole model is never loaded.

What a layer returns beside states (keys that later layers read) hands on no gradient. Linears
outside of the layers are not measured."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.data.tokens.token_store import Document, TokenStore
from workflow.lib.quantization.calibrated_base import drawn_rows, text_rows
from workflow.lib.quantization.calibration import (
    LOGITS_AT_ONCE,
    document_losses,
    put_absmax_,
    quantized_modules,
    weights_of,
)
from workflow.lib.quantization.layer_stream import Batch, LayerCarry, LayerStream
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import setting_error
from workflow.lib.system.progress import Progress

OWN_TOKENS = 8192  # of training rows, and as many of `quantize.calibration_text`
TRAINING, TEXT = "training", "text"  # kinds of the user's own text

Texts = Mapping[str, Sequence[Batch]]
"""Batches of one row by kind of text; `counted`: the predicted tokens."""
Costs = dict[str, dict[str, float]]
"""Nats a token by kind of text and path of a weight."""
BACKWARD = 3.0  # of a pass forward: it is repeated, with gradients of states and of weights
LEAST_COST = 1e-4  # nats a token of a kind of text that lost nothing: its order still counts


def own_texts(
    settings: QuantizeConfig, store: TokenStore, model: Checkpoint, *, device: torch.device
) -> dict[str, list[Batch]]:
    """Return training rows and the calibration text, if one is named. Raises `UserError` without a
    training row, or for a text that cannot be read."""
    if not store.num_rows:
        raise setting_error(
            "quantize.keep",
            "auto",
            "it measures linears on training rows, and the tokens hold none",
            "Add rows to data.train, or name the linears",
        )
    count = min(store.num_rows, max(1, round(OWN_TOKENS / store.seq_len)))
    texts = {TRAINING: [_row(store, x, device) for x in drawn_rows(store.num_rows, count=count)]}
    if settings.calibration_text is not None:
        rows = text_rows(settings.calibration_text, model, tokens=OWN_TOKENS, width=store.seq_len)
        texts[TEXT] = [Batch.from_document(row, np.ones(len(row), bool), device) for row in rows]
    return texts


def other_texts(
    documents: Sequence[Document], kinds: Sequence[str], *, device: torch.device
) -> dict[str, list[Batch]]:
    """Return documents as batches by their kind."""
    texts: dict[str, list[Batch]] = {}
    for (ids, mask), kind in zip(documents, kinds, strict=True):
        texts.setdefault(kind, []).append(Batch.from_document(ids, mask, device))
    return texts


def _row(store: TokenStore, number: int, device: torch.device) -> Batch:
    batch = Batch.from_document(store.input_ids[number], store.loss_mask[number], device)
    positions = torch.from_numpy(store.position_ids[number].astype(np.int64))
    return replace(batch, position_ids=positions.reshape(1, -1).to(device))


def measured_costs(
    stream: LayerStream, texts: Texts, paths: Collection[str], settings: QuantizeConfig
) -> Costs:
    """Return the cost of 4 bits of the linears and stacks of `paths` in layers; they add up to what
    all cost together, at least `LEAST_COST`."""
    rows = [(kind, batch) for kind, batches in texts.items() for batch in batches]
    batches, num_layers = [batch for _, batch in rows], len(stream.layers)
    squares: Costs = {kind: {} for kind in texts}
    # a row passes each layer, and the head, in the original model, in 4 bits, and backward
    passes = (num_layers + 1) * len(rows)
    work = (2 + BACKWARD) * passes
    with Progress("measuring", total=3 * passes, unit="passes", total_work=work) as progress:
        inputs, last, rises = _forward(stream, batches, paths, settings, progress)
        grads = []
        for batch, states in zip(batches, last, strict=True):
            grads.append(_loss_grad(stream, batch, states))
            progress.add(1, work=BACKWARD)
        for number in reversed(range(num_layers)):
            with stream.loaded(number) as layer:
                layer_pass = _LayerBackward(stream, number, layer, paths, settings)
                for index, (kind, batch) in enumerate(rows):
                    states, batch.beside = inputs[number][index]
                    grads[index], own = layer_pass.run(batch, states, grads[index])
                    for path, square in own.items():
                        squares[kind][path] = squares[kind].get(path, 0.0) + square
                    progress.add(1, work=BACKWARD)
            inputs.pop()
    tokens, costs = predicted_tokens(texts), dict.fromkeys(texts, 0.0)
    for (kind, _), rise in zip(rows, rises, strict=True):
        costs[kind] += rise / tokens[kind]
    return {
        kind: {
            path: square * max(LEAST_COST, costs[kind]) / sum(own.values())
            for path, square in own.items()
        }
        for kind, own in squares.items()
    }


def predicted_tokens(texts: Texts) -> dict[str, int]:
    """Return the predicted tokens by kind of text."""
    return {kind: sum(len(batch.targets) for batch in rows) for kind, rows in texts.items()}


_Inputs = list[list[tuple[torch.Tensor, dict[int, LayerCarry]]]]


def _forward(
    stream: LayerStream,
    batches: Sequence[Batch],
    paths: Collection[str],
    settings: QuantizeConfig,
    progress: Progress,
) -> tuple[_Inputs, list[torch.Tensor], list[float]]:
    """Return each layer's states by row, with what is beside them, the last output, and what 4 bits
    add to each row's summed loss, nats."""
    inputs: _Inputs = []
    in_4_bits = [batch.for_another_model() for batch in batches]
    hidden = [stream.first_hidden(batch).cpu() for batch in batches]
    rounded = list(hidden)

    def run(rows: Sequence[Batch], states: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for row, x in zip(rows, states, strict=True):
            yield stream.run(number, row, x.to(row.input_ids.device)).cpu()
            progress.add(1)

    def losses(rows: Sequence[Batch], states: Sequence[torch.Tensor]) -> Iterator[float]:
        for row, x in zip(rows, states, strict=True):
            yield from document_losses(stream, [row], [x])
            progress.add(1)

    for number in range(len(stream.layers)):
        pairs = zip(hidden, batches, strict=True)
        inputs.append([(states, {number: batch.beside[number]}) for states, batch in pairs])
        with stream.loaded(number) as layer:
            hidden = list(run(batches, hidden))
            prefix = stream.prefixes[number]
            for path, part in quantized_modules(layer, paths, prefix=prefix).items():
                put_absmax_(part, settings, path=f"{prefix}.{path}", paths=paths)
            rounded = list(run(in_4_bits, rounded))
    both = zip(losses(batches, hidden), losses(in_4_bits, rounded), strict=True)
    return inputs, hidden, [after - before for before, after in both]


def _loss_grad(stream: LayerStream, batch: Batch, states: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a row's summed loss for its last states, in host memory."""
    states = states.to(batch.input_ids.device).requires_grad_()
    total = torch.zeros_like(states)
    for part in batch.targets.split(LOGITS_AT_ONCE):
        logits = stream.logits(batch, states, part - 1, grad=True)[0].float()
        loss = nn.functional.cross_entropy(logits, batch.input_ids[0, part], reduction="sum")
        total += torch.autograd.grad(loss, states)[0]
    return total.cpu()


class _LayerBackward:
    """The backward of a loaded layer, with gradients of the weights that NF4 would change."""

    def __init__(
        self,
        stream: LayerStream,
        number: int,
        layer: nn.Module,
        paths: Collection[str],
        settings: QuantizeConfig,
    ) -> None:
        self._stream, self._number = stream, number
        self._weights: dict[str, nn.Parameter] = {}
        self._changes: dict[str, torch.Tensor] = {}
        prefix = stream.prefixes[number]
        for path, part in quantized_modules(layer, paths, prefix=prefix).items():
            weights = weights_of(part, f"{prefix}.{path}", paths)
            originals = {name: weight.detach().clone() for name, weight in weights.items()}
            with torch.no_grad():
                put_absmax_(part, settings, path=f"{prefix}.{path}", paths=paths)
                for name, weight in weights.items():
                    self._changes[name] = weight - originals[name]
                    weight.copy_(originals[name])
                    weight.requires_grad_()
                    self._weights[name] = weight

    def run(
        self, batch: Batch, states: torch.Tensor, grad: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the gradient for the states, in host memory, and |g * dw|^2 by weight; grad: for
        the layer's output."""
        device = batch.input_ids.device
        states = states.to(device).requires_grad_()
        output = self._stream.run(self._number, batch, states, grad=True)
        inputs = [states, *self._weights.values()]
        own, *grads = torch.autograd.grad(output, inputs, grad.to(device), allow_unused=True)
        squares = {
            name: float(torch.linalg.vector_norm(x * self._changes[name], dtype=torch.float32)) ** 2
            for name, x in zip(self._weights, grads, strict=True)
            if x is not None
        }
        return own.cpu(), squares
