"""The tokens that calibrate each expert of a layer: those that the router sends to it.

Of few tokens the correlation says little, so tokens of other experts are added, spread evenly,
until there are `ENOUGH` times as many as a weight has inputs (llm-compressor sends all to all)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workflow.lib.quantization.counted import Counted
from workflow.lib.quantization.layer_inputs import Run
from workflow.lib.system.errors import UserError

# Tokens for each input of a weight. Of 0, 1/4 and 1 this lost least where tokens were few: those of
# an expert are worth more than many of others, since damping makes a singular correlation
# invertible (docs/results.md).
ENOUGH = 0.25
TOKENS_AT_ONCE = 8192  # that go through an expert


def enough_tokens(in_features: int) -> int:
    """Return how many tokens calibrate a weight of an expert at least."""
    return round(ENOUGH * in_features)


@dataclass(frozen=True)
class ExpertTokens:
    """What goes into the experts of a layer, in host memory."""

    states: torch.Tensor  # (tokens, hidden), in the type of activations
    chosen: torch.Tensor  # (tokens, k) int64: the experts that each token goes to

    def routed(self, expert: int) -> int:
        return int((self.chosen == expert).any(1).sum())

    def of(self, expert: int, *, in_features: int) -> Iterator[torch.Tensor]:
        """Yield, in parts, the states (rows, hidden) that calibrate an expert of so many inputs."""
        goes = (self.chosen == expert).any(1)
        own, others = goes.nonzero().flatten(), (~goes).nonzero().flatten()
        lacking = min(len(others), max(0, enough_tokens(in_features) - len(own)))
        spread = torch.arange(lacking) * len(others) // max(1, lacking)
        for part in torch.cat([own, others[spread]]).split(TOKENS_AT_ONCE):
            yield self.states[part]


def expert_tokens(
    path: str, experts: nn.Module, runs: Iterable[tuple[Run, Counted]]
) -> ExpertTokens:
    """Return the tokens that these runs take to the experts of a layer. runs: with which of their
    tokens count. Raises `UserError` if a state is not finite."""
    states: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    for run, counted in runs:

        def keep(module: nn.Module, inputs: tuple[Any, ...], counted: Counted = counted) -> None:
            hidden, index, *_ = inputs
            states.append(counted.of(hidden, call=0).cpu())
            chosen.append(counted.of(index, call=0).cpu())

        hook = experts.register_forward_pre_hook(keep)
        try:
            run()
        finally:
            hook.remove()
    found = ExpertTokens(torch.cat(states), torch.cat(chosen))
    if not found.states.isfinite().all():
        raise UserError(
            f"calibration: {path} sees values that are not finite (in the type of activations of "
            "this device). Is model.source whole? Else set quantize.method: absmax"
        )
    return found
