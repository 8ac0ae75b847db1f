"""Inputs of a decoder layer's linears and experts, from calibration tokens: which share an input,
correlations of inputs, and each expert's routed tokens.

The correlation of few tokens is poor. So an expert also gets tokens of others, spread evenly, up to
`ENOUGH` times its number of inputs (llm-compressor sends all to all)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn

from workflow.lib.model.documents import Documents
from workflow.lib.system.errors import UserError


@dataclass(frozen=True)
class Counted:
    """Masks of counted rows. whole: (tokens,) of packed rows, None: all; apart: by call of a module
    in a recurrent layer, which gets documents by group."""

    whole: torch.Tensor | None = None
    apart: tuple[torch.Tensor, ...] = ()

    def of(self, rows: torch.Tensor, *, call: int) -> torch.Tensor:
        """Return the counted rows of a module's rows (rows, ...) in call number `call`, from 0."""
        mask = self.whole
        if call < len(self.apart) and len(self.apart[call]) == len(rows):
            mask = self.apart[call]
        return rows if mask is None or len(mask) != len(rows) else rows[mask]


def counted_tokens(counted: torch.Tensor | None, documents: Documents | None) -> Counted:
    """Return the counted rows from `counted` (rows, tokens) (None: all). documents: for recurrent
    layers, which take them one by one; None if the model has none."""
    whole = None if counted is None else counted.flatten()
    if documents is None or documents.order is None:
        return Counted(whole)
    is_counted = torch.ones_like(documents.order, dtype=torch.bool) if whole is None else whole
    sizes = [count * length for count, length in documents.shapes]
    at_places = torch.zeros(sum(sizes), dtype=torch.bool, device=is_counted.device)
    at_places[documents.order] = is_counted  # padding does not count
    return Counted(whole, at_places.split(sizes))


Run = Callable[[], object]


def groups_by_input(parts: dict[str, nn.Module], run: Run) -> list[list[str]]:
    """Return the paths of linears and experts by their first calls in `run`, grouped by input.
    Parts without a call are groups of their own, at the end."""
    by_input: dict[int, list[str]] = {}
    alive: list[torch.Tensor] = []  # a freed input would give its address to the next one

    def look(path: str, features: torch.Tensor, *_: Any) -> None:
        alive.append(features)
        if not any(path in group for group in by_input.values()):
            by_input.setdefault(id(features), []).append(path)

    _with_inputs(parts, look, run)
    called = {path for group in by_input.values() for path in group}
    return [*by_input.values(), *([path] for path in parts if path not in called)]


def input_correlation(
    path: str, linear: nn.Linear, runs: Iterable[tuple[Run, Counted]]
) -> torch.Tensor:
    """Return the mean of x x^T (in, in) fp32 over all counted inputs of a linear in these runs;
    zeros without any. Raises `UserError` if one is not finite."""
    total = torch.zeros(linear.in_features, linear.in_features, device=linear.weight.device)
    inputs = 0
    for run, counted in runs:
        calls = count()

        def add(
            _: str, features: torch.Tensor, counted: Counted = counted, calls: Iterator[int] = calls
        ) -> None:
            nonlocal inputs
            rows = counted.of(features.flatten(0, -2), call=next(calls)).float()
            total.addmm_(rows.T, rows)
            inputs += len(rows)

        _with_inputs({path: linear}, add, run)
    _check_finite(total, path)
    return total / max(1, inputs)


def _check_finite(values: torch.Tensor, path: str) -> None:
    if not values.isfinite().all():
        raise UserError(
            f"calibration: {path} sees values that are not finite (in the type of activations of "
            "this device). Is model.source whole? Else set quantize.method: absmax"
        )


def _with_inputs(parts: dict[str, nn.Module], look: Callable[..., None], run: Run) -> None:
    """Call `run`; at each call of a part, `look` gets its path and its inputs."""
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs, path=path: look(path, *inputs))
        for path, part in parts.items()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()


# Tokens for each input of a weight. Of 0, 1/4 and 1 this lost least with few tokens: an expert's
# own are worth more than many of others, since damping makes a singular correlation invertible.
# With 512 tokens 1/4 was better than 0 by 0.010 [0.000, 0.020] nats; with 2,048 no difference was
# clear (mixture-demo, 2026-11-24).
ENOUGH = 0.25
TOKENS_AT_ONCE = 8192  # in one forward of an expert


def enough_tokens(in_features: int) -> int:
    """Return the least number of tokens that calibrate a weight of an expert."""
    return round(ENOUGH * in_features)


@dataclass(frozen=True)
class ExpertTokens:
    """The inputs of a layer's experts, in host memory."""

    states: torch.Tensor  # (tokens, hidden), in the type of activations
    chosen: torch.Tensor  # (tokens, k) int64: the experts of each token

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
    """Return the tokens that these runs route to the experts of a layer. runs: each with its
    counted tokens. Raises `UserError` if a state is not finite."""
    states: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    for run, counted in runs:

        def keep(
            _: str, hidden: torch.Tensor, index: torch.Tensor, *__: Any, counted: Counted = counted
        ) -> None:
            states.append(counted.of(hidden, call=0).cpu())
            chosen.append(counted.of(index, call=0).cpu())

        _with_inputs({path: experts}, keep, run)
    tokens = ExpertTokens(torch.cat(states), torch.cat(chosen))
    _check_finite(tokens.states, path)
    return tokens
