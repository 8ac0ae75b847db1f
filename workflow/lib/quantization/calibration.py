"""Quantization of a model layer by layer, each with the inputs from the quantized layers before it.

Beside the calibration rows, held-out documents run through three models at once: the original one,
bitsandbytes' (absmax), and the calibrated one. Their losses show the cost of 4 bits and the gain of
calibration, at the price of three passes, without ever loading a whole model."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from workflow.lib.checkpoints.decoder_layers import experts_modules, matmul_names
from workflow.lib.quantization.calibrated_rounding import (
    Rounded,
    codes_with_feedback,
    decode,
    decoded_weight,
    error_feedback,
    largest_of_blocks,
    round_absmax,
    round_calibrated,
    searched_scales,
)
from workflow.lib.quantization.layer_inputs import (
    Counted,
    ExpertTokens,
    enough_tokens,
    expert_tokens,
    groups_by_input,
    input_correlation,
)
from workflow.lib.quantization.layer_stream import Batch, LayerStream
from workflow.lib.quantization.nf4_codes import Scales, packed_codes, store_scales
from workflow.lib.settings.config import QuantizeConfig

logger = logging.getLogger("workflow")

Inputs = Callable[[int], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class PackedStack:
    """The NF4 codes of all experts of a stack."""

    codes: torch.Tensor  # uint8, two codes a byte, shape (bytes, 1)
    scales: Scales
    shape: tuple[int, int, int]  # (experts, out, in)


@dataclass(frozen=True)
class LoadedStack:
    """The weights of a stack in a loaded layer; experts are read and replaced as (out, in)."""

    weights: torch.Tensor  # in the module's layout
    transposed: bool

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, out, in)."""
        experts, first, second = self.weights.shape
        return (experts, second, first) if self.transposed else (experts, first, second)

    def part(self, number: int) -> torch.Tensor:
        """Return a view (out, in) of one expert's weight."""
        weight = self.weights[number]
        return weight.T if self.transposed else weight

    def expert(self, number: int) -> torch.Tensor:
        """Return a copy (out, in) fp32 of one expert's weight."""
        return self.part(number).float().clone(memory_format=torch.contiguous_format)

    def replace_(self, number: int, weight: torch.Tensor) -> None:
        """Write an expert's weight (out, in)."""
        self.part(number).copy_(weight)


def loaded_stacks(experts: nn.Module) -> dict[str, LoadedStack]:
    """Return the two stacks of an experts module, by name, the first matmul's first."""
    return {
        name: LoadedStack(experts.get_parameter(name).data, bool(experts.is_transposed))
        for name in matmul_names(experts)
    }


def quantize_experts(
    experts: nn.Module,
    tokens: ExpertTokens,
    settings: QuantizeConfig,
    *,
    path: str,
    paths: Collection[str],
) -> Iterator[tuple[str, PackedStack]]:
    """Yield name and codes of the stacks in `paths` of an experts module at `path`, and replace the
    weights by decoded ones: each expert is rounded as a linear, by its own tokens. Raises
    `UserError` if a weight is not finite.

    The scales of a stack are nested together, because the mean subtracted from them is the whole
    stack's (`nf4_codes`). So all experts get their scales first, and then their codes. The second
    stack gets the 4-bit output of the first. One expert at a time is on the device in fp32."""
    device = next(experts.parameters()).device
    (up, first), (down, second) = loaded_stacks(experts).items()
    enough = enough_tokens(first.shape[2])
    if few := sum(tokens.routed(number) < enough for number in range(len(first))):
        message = "%s: %d of %d experts got fewer than %d tokens; others' calibrate them too"
        logger.info(message, path, few, len(first), enough)

    def states(number: int, stack: LoadedStack) -> Iterator[torch.Tensor]:
        return (part.to(device) for part in tokens.of(number, in_features=stack.shape[2]))

    def products(number: int) -> Iterator[torch.Tensor]:
        return (_between(experts, number, part) for part in states(number, second))

    for name, stack, inputs in (
        (up, first, lambda number: states(number, first)),
        (down, second, products),
    ):
        if (stack_path := f"{path}.{name}") in paths:
            yield name, _quantize_stack(stack, inputs, settings, what=stack_path)


def _between(experts: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
    """Return the input of the second matmul of an expert, (rows, intermediate)."""
    name, stack = next(iter(loaded_stacks(experts).items()))
    bias = experts.get_parameter(f"{name}_bias")[number] if experts.has_bias else None
    up = nn.functional.linear(states, stack.part(number), bias)
    activation: Any = experts._apply_gate if experts.has_gate else experts.act_fn
    result: torch.Tensor = activation(up)
    return result


def _quantize_stack(
    stack: LoadedStack, inputs: Inputs, settings: QuantizeConfig, *, what: str
) -> PackedStack:
    block_size = settings.block_size
    searched = [
        searched_scales(stack.expert(number), _mean_squares(inputs(number)), block_size=block_size)
        for number in range(len(stack))
    ]
    scales = store_scales(torch.cat(searched), double_quant=settings.double_quant)
    codes = []
    for number, own in enumerate(scales.decoded.chunk(len(stack))):
        feedback = error_feedback(_correlation(inputs(number)), what=f"{what}, expert {number}")
        chosen = codes_with_feedback(stack.expert(number), feedback, own, block_size=block_size)
        codes.append(packed_codes(chosen.flatten()).cpu())
        stack.replace_(number, decoded_weight(chosen, own, block_size=block_size))
    return PackedStack(torch.cat(codes), scales, stack.shape)


def absmax_experts(stack: LoadedStack, settings: QuantizeConfig) -> Iterator[torch.Tensor]:
    """Yield the weight (out, in) fp32 of each expert as decoded from bitsandbytes' codes."""
    block_size, numbers = settings.block_size, range(len(stack))
    largest = [largest_of_blocks(stack.expert(n), block_size=block_size) for n in numbers]
    scales = store_scales(torch.cat(largest), double_quant=settings.double_quant)
    for number, own in enumerate(scales.decoded.chunk(len(stack))):
        codes = round_absmax(stack.expert(number), settings).codes
        yield decoded_weight(codes, own, block_size=block_size)


def _mean_squares(inputs: Iterable[torch.Tensor]) -> torch.Tensor:
    sums = [(part.float().square().sum(0), len(part)) for part in inputs]
    return sum((total for total, _ in sums), torch.zeros(())) / sum(count for _, count in sums)


def _correlation(inputs: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the mean of x x^T over all inputs x, fp32, shape (in, in)."""
    total, count = torch.zeros(()), 0
    for part in inputs:
        rows = part.float()
        total = rows.T @ rows if not count else total.addmm_(rows.T, rows)
        count += len(rows)
    return total / count


ORIGINAL, ABSMAX, CALIBRATED = "original", "absmax", "calibrated"
MODELS = (ORIGINAL, ABSMAX, CALIBRATED)
ROWS = "calibration"


Hidden = dict[str, list[torch.Tensor]]
"""Hidden states between two layers, on the host, by batch: of `ROWS` and of each of `MODELS`."""


@dataclass(frozen=True)
class QuantizedLayer:
    rounded: dict[str, Rounded] = field(default_factory=dict)
    stacks: dict[str, PackedStack] = field(default_factory=dict)


class Calibration:
    """Runs calibration rows and measured documents through the layers of a stream."""

    def __init__(
        self,
        stream: LayerStream,
        rows: list[Batch],
        measured: list[Batch],
        settings: QuantizeConfig,
        *,
        paths: Collection[str],
    ) -> None:
        """paths: of the linears and stacks to quantize; all others stay in 16 bits."""
        self._paths = paths
        self._stream, self._settings = stream, settings
        self._outside = _Outside(stream, paths, settings)
        self.batches = {ROWS: rows}
        """Batches of the calibration rows, and of the measured documents for each model."""
        for model in MODELS:
            self.batches[model] = [batch.for_another_model() for batch in measured]
        self.first_hidden: Hidden = {}
        for name, batches in self.batches.items():
            self._outside.put_(stored=name != ORIGINAL)
            self.first_hidden[name] = [stream.first_hidden(batch).cpu() for batch in batches]

    @torch.no_grad()
    def quantize(self, number: int, hidden: Hidden) -> QuantizedLayer:
        """Quantize a layer; `hidden` then holds its output."""
        with self._stream.loaded(number) as layer:
            prefix = self._stream.prefixes[number]
            parts = quantized_modules(layer, self._paths, prefix=prefix)
            originals = [
                (weight, _put_aside(weight))
                for path, part in parts.items()
                for weight in weights_of(part, f"{prefix}.{path}", self._paths).values()
            ]
            self._run(number, hidden, ORIGINAL)
            result = QuantizedLayer()
            for group in groups_by_input(parts, self._runs(number, hidden)[0][0]):
                self._quantize_group(number, {path: parts[path] for path in group}, hidden, result)
            self._run(number, hidden, ROWS)
            self._run(number, hidden, CALIBRATED)
            for weight, original in originals:
                weight.copy_(original)
            for path, part in parts.items():
                put_absmax_(part, self._settings, path=f"{prefix}.{path}", paths=self._paths)
            self._run(number, hidden, ABSMAX)
        return result

    def _quantize_group(
        self, number: int, parts: dict[str, nn.Module], hidden: Hidden, result: QuantizedLayer
    ) -> None:
        """Quantize modules that share an input, and replace their weights by decoded ones."""
        linears = {path: part for path, part in parts.items() if isinstance(part, nn.Linear)}
        if linears:
            self._quantize_linears(number, linears, hidden, result)
        for path in [path for path in parts if path not in linears]:
            name, runs = f"{self._stream.prefixes[number]}.{path}", self._runs(number, hidden)
            tokens = expert_tokens(name, parts[path], runs)
            experts = quantize_experts(
                parts[path], tokens, self._settings, path=name, paths=self._paths
            )
            for stack, packed in experts:
                result.stacks[f"{path}.{stack}"] = packed

    def _quantize_linears(
        self, number: int, linears: dict[str, nn.Linear], hidden: Hidden, result: QuantizedLayer
    ) -> None:
        """Quantize linears that share an input, and replace their weights by decoded ones."""
        path, first = next(iter(linears.items()))
        name = f"{self._stream.prefixes[number]}.{path}"
        correlation = input_correlation(name, first, self._runs(number, hidden))
        feedback = error_feedback(correlation, what=name)
        for path, linear in linears.items():
            rounded = round_calibrated(linear.weight.float(), feedback, self._settings)
            result.rounded[path] = rounded
            linear.weight.copy_(decode(rounded, block_size=self._settings.block_size))

    def _runs(self, number: int, hidden: Hidden) -> list[tuple[partial[torch.Tensor], Counted]]:
        """Return calls of each calibration batch through the layer, and its counted tokens."""
        self._outside.put_(stored=True)
        pairs = zip(self.batches[ROWS], hidden[ROWS], strict=True)
        return [
            (partial(self._forward, number, batch, states), self._stream.counted(batch))
            for batch, states in pairs
        ]

    def _run(self, number: int, hidden: Hidden, name: str) -> None:
        """Run the states of one of `batches` through the layer as it is now."""
        self._outside.put_(stored=name != ORIGINAL)
        pairs = zip(self.batches[name], hidden[name], strict=True)
        hidden[name] = [self._forward(number, *pair) for pair in pairs]

    def losses(self, hidden: Hidden, model: str) -> list[float]:
        """Return the summed -log p (nats) of each measured document, from the last output."""
        self._outside.put_(stored=model != ORIGINAL)
        return document_losses(self._stream, self.batches[model], hidden[model])

    def _forward(self, number: int, batch: Batch, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for hidden states in host memory, in host memory."""
        device = batch.input_ids.device
        return self._stream.run(number, batch, states.to(device)).cpu()


class _Outside:
    """Linears outside of the decoder layers (Gemma 4's of the embeddings of all layers), original
    or as the base stores them: in bitsandbytes' codes by both methods."""

    def __init__(
        self, stream: LayerStream, paths: Collection[str], settings: QuantizeConfig
    ) -> None:
        modules = stream.model.named_modules()
        linears = {path: x for path, x in modules if isinstance(x, nn.Linear) and path in paths}
        self._weights = [linear.weight for linear in linears.values()]
        self._originals = [weight.detach().clone() for weight in self._weights]
        for path, linear in linears.items():
            put_absmax_(linear, settings, path=path, paths=paths)
        self._stored = [weight.detach().clone() for weight in self._weights]

    @torch.no_grad()
    def put_(self, *, stored: bool) -> None:
        """Give them the stored weights, or their own."""
        values = self._stored if stored else self._originals
        for weight, value in zip(self._weights, values, strict=True):
            weight.copy_(value)


LOGITS_AT_ONCE = 256  # positions at a time: a vocabulary of 256k takes 0.3 GiB in fp32


SummedLoss = Callable[[int, slice, torch.Tensor, torch.Tensor], torch.Tensor]
"""The summed loss () fp64 of a document's counted tokens: (the document's number, which of these
tokens, their logits (n, vocabulary), their ids (n,))."""


def summed_nll(
    document: int, tokens: slice, logits: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Return the summed -log p (nats) of targets (n,)."""
    return nn.functional.cross_entropy(logits, targets, reduction="sum").double().cpu()


@torch.no_grad()
def document_losses(
    stream: LayerStream,
    batches: Sequence[Batch],
    hidden: list[torch.Tensor],
    *,
    loss: SummedLoss = summed_nll,
) -> list[float]:
    """Return the summed loss of the counted tokens of each batch, a document each."""
    losses = []
    for number, (batch, states) in enumerate(zip(batches, hidden, strict=True)):
        targets = batch.targets
        total = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(targets), LOGITS_AT_ONCE):
            tokens = slice(start, start + LOGITS_AT_ONCE)
            part = targets[tokens]
            logits = stream.logits(batch, states.to(part.device), part - 1)[0].float()
            total += loss(number, tokens, logits, batch.input_ids[0, part])
        losses.append(float(total))
    return losses


def quantized_modules(
    layer: nn.Module, paths: Collection[str], *, prefix: str
) -> dict[str, nn.Module]:
    """Return the linears in `paths`, and experts with a stack in it, of a layer at `prefix`, by
    path in the layer."""
    modules: dict[str, nn.Module] = {
        path: module
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear) and f"{prefix}.{path}" in paths
    }
    return modules | {
        path: experts
        for path, experts in experts_modules(layer)
        if any(f"{prefix}.{path}.{name}" in paths for name in loaded_stacks(experts))
    }


def weights_of(part: nn.Module, path: str, paths: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the weights of a linear, or of experts, that are in `paths`, by path."""
    if isinstance(part, nn.Linear):
        return {path: part.get_parameter("weight")}
    stacks = {f"{path}.{name}": part.get_parameter(name) for name in matmul_names(part)}
    return {name: weight for name, weight in stacks.items() if name in paths}


def _put_aside(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy; of a stack in host memory, as all of its experts may fill a GPU."""
    return weight.clone() if weight.dim() == 2 else weight.detach().to("cpu", copy=True)


def put_absmax_(
    part: nn.Module, settings: QuantizeConfig, *, path: str, paths: Collection[str]
) -> None:
    """Replace the weights of a linear, or the stacks in `paths` of experts at `path`, by those
    decoded from bitsandbytes' codes."""
    if isinstance(part, nn.Linear):
        rounded = round_absmax(part.weight.float(), settings)
        part.weight.copy_(decode(rounded, block_size=settings.block_size))
        return
    for name, stack in loaded_stacks(part).items():
        if f"{path}.{name}" in paths:
            for number, weight in enumerate(absmax_experts(stack, settings)):
                stack.replace_(number, weight)
