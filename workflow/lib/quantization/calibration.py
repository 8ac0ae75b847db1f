"""Quantize a model layer by layer, each with the inputs that the quantized layers before it give.

Beside the calibration rows, held-out documents go through three models at once: the original one,
the one of bitsandbytes' choice (absmax), and the calibrated one. Their losses say what 4 bits cost
and what calibration won back, at the price of three passes, without ever loading a whole model.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from workflow.lib.artifacts.quantization_record import LinearErrors
from workflow.lib.quantization.calibrated_rounding import (
    Rounded,
    decode,
    error_feedback,
    round_absmax,
    round_calibrated,
    weighted_error,
)
from workflow.lib.quantization.layer_inputs import groups_by_input, input_correlation
from workflow.lib.quantization.layer_stream import Batch, LayerStream
from workflow.lib.settings.config import QuantizeConfig
from workflow.lib.system.errors import UserError

ORIGINAL, ABSMAX, CALIBRATED = "original", "absmax", "calibrated"
MODELS = (ORIGINAL, ABSMAX, CALIBRATED)


@dataclass
class Hidden:
    """Hidden states between two layers, in host memory, one tensor for each batch."""

    calibration: list[torch.Tensor] = field(default_factory=list)
    measured: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By model (`MODELS`)."""


@dataclass(frozen=True)
class QuantizedLayer:
    """What becomes of a layer: codes and scales of its linears, by path in the layer."""

    rounded: dict[str, Rounded]
    errors: dict[str, LinearErrors]


class Calibration:
    """Takes calibration rows and measured documents through the layers of a stream."""

    def __init__(
        self,
        stream: LayerStream,
        rows: list[Batch],
        measured: list[Batch],
        settings: QuantizeConfig,
    ) -> None:
        self._stream, self._rows, self._measured = stream, rows, measured
        self._settings = settings
        stream.record([*rows, *measured])

    def first_hidden(self) -> Hidden:
        """Return what goes into the first layer."""
        measured = [_inputs(batch) for batch in self._measured]
        return Hidden(
            calibration=[_inputs(batch) for batch in self._rows],
            measured={model: list(measured) for model in MODELS},
        )

    @torch.no_grad()
    def quantize(self, number: int, hidden: Hidden) -> QuantizedLayer:
        """Quantize a layer; `hidden` then holds what comes out of it."""
        with self._stream.loaded(number) as layer:
            linears = quantized_linears(layer)
            originals = {path: linear.weight.clone() for path, linear in linears.items()}
            self._measure(number, hidden, ORIGINAL)
            result = QuantizedLayer({}, {})
            for group in groups_by_input(linears, self._runs(number, hidden)[0][0]):
                self._quantize_group(
                    number, {path: linears[path] for path in group}, hidden, result
                )
            hidden.calibration = [
                self._forward(number, batch, states)
                for batch, states in zip(self._rows, hidden.calibration, strict=True)
            ]
            self._measure(number, hidden, CALIBRATED)
            for path, linear in linears.items():
                rounded = round_absmax(originals[path].float(), self._settings)
                linear.weight.copy_(decode(rounded, block_size=self._settings.block_size))
            self._measure(number, hidden, ABSMAX)
        return result

    def _quantize_group(
        self, number: int, linears: dict[str, nn.Linear], hidden: Hidden, result: QuantizedLayer
    ) -> None:
        """Quantize linears that share an input, and put the decoded weights in their place."""
        path, first = next(iter(linears.items()))
        name = f"{self._stream.prefixes[number]}.{path}"
        correlation = input_correlation(name, first, self._runs(number, hidden))
        feedback = error_feedback(correlation, what=name)
        for path, linear in linears.items():
            weight = linear.weight.float()
            if not weight.isfinite().all():
                raise UserError(
                    f"{self._stream.prefixes[number]}.{path}.weight of model.source holds values "
                    "that are not finite. Download or export the model again"
                )
            rounded = round_calibrated(weight, feedback, self._settings)
            decoded = decode(rounded, block_size=self._settings.block_size)
            plain = decode(
                round_absmax(weight, self._settings), block_size=self._settings.block_size
            )
            result.rounded[path] = rounded
            result.errors[path] = _errors(weight, plain, decoded, correlation)
            linear.weight.copy_(decoded)

    def _runs(
        self, number: int, hidden: Hidden
    ) -> list[tuple[partial[torch.Tensor], torch.Tensor | None]]:
        """Return calls that take each calibration batch through the layer, and what counts in
        it.
        """
        pairs = zip(self._rows, hidden.calibration, strict=True)
        return [
            (partial(self._forward, number, batch, states), batch.counted)
            for batch, states in pairs
        ]

    def _measure(self, number: int, hidden: Hidden, model: str) -> None:
        pairs = zip(self._measured, hidden.measured[model], strict=True)
        hidden.measured[model] = [self._forward(number, *pair) for pair in pairs]

    def _forward(self, number: int, batch: Batch, states: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes of hidden states in host memory, in host memory."""
        device = batch.input_ids.device
        return self._stream.run(number, batch, states.to(device)).cpu()


LOGITS_AT_ONCE = 256  # positions: a vocabulary of 256k takes 0.3 GiB in fp32


@torch.no_grad()
def document_losses(
    stream: LayerStream, batches: list[Batch], hidden: list[torch.Tensor]
) -> list[float]:
    """Return the summed -log p (nats) of the counted tokens of each batch, a document each."""
    losses = []
    for batch, states in zip(batches, hidden, strict=True):
        assert batch.counted is not None, "measured documents say what is predicted"
        targets = batch.counted[0, 1:].nonzero().flatten() + 1
        total = torch.zeros((), dtype=torch.float64)
        for part in targets.split(LOGITS_AT_ONCE):
            logits = stream.logits(batch, states.to(part.device), part - 1)[0].float()
            wanted = batch.input_ids[0, part]
            total += nn.functional.cross_entropy(logits, wanted, reduction="sum").double().cpu()
        losses.append(float(total))
    return losses


def quantized_linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears of a decoder layer by path."""
    return {path: module for path, module in layer.named_modules() if isinstance(module, nn.Linear)}


def _inputs(batch: Batch) -> torch.Tensor:
    assert batch.first_hidden is not None, "the stream has recorded this batch"
    return batch.first_hidden.cpu()


def _errors(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    calibrated: torch.Tensor,
    correlation: torch.Tensor,
) -> LinearErrors:
    """Return the errors of both methods."""
    return LinearErrors(
        absmax=weighted_error(weight, absmax, correlation),
        calibrated=weighted_error(weight, calibrated, correlation),
        absmax_plain=plain_error(weight, absmax),
        calibrated_plain=plain_error(weight, calibrated),
    )


def plain_error(weight: torch.Tensor, approximation: torch.Tensor) -> float:
    """Return the share of the weight's squared norm that is wrong."""
    lost = (weight - approximation).square().sum(dtype=torch.float64)
    return float(lost / weight.square().sum(dtype=torch.float64).clamp_min(1e-30))
