"""Stacks of experts by calibration: each expert is rounded as a linear, by its own tokens.

The scales of a stack are nested together, because the mean subtracted from them is the whole
stack's (`nf4_codes`). So all experts get their scales first, and then their codes. The second stack
gets the 4-bit output of the first. One expert at a time is on the device in fp32."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workflow.lib.checkpoints.expert_stacks import matmul_names
from workflow.lib.quantization.calibrated_rounding import (
    codes_with_feedback,
    decoded_weight,
    error_feedback,
    largest_of_blocks,
    round_absmax,
    searched_scales,
)
from workflow.lib.quantization.layer_inputs import ExpertTokens, enough_tokens
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
    weights by decoded ones. Raises `UserError` if a weight is not finite."""
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
