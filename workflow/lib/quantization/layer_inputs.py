"""What the linears of a decoder layer see: which share an input, and the correlations of inputs."""

from collections.abc import Callable, Iterable, Iterator
from itertools import count

import torch
from torch import nn

from workflow.lib.quantization.counted import Counted
from workflow.lib.system.errors import UserError

Run = Callable[[], object]


def groups_by_input(parts: dict[str, nn.Module], run: Run) -> list[list[str]]:
    """Return the paths of linears and experts in the order in which `run` calls them first, those
    with one input together. What it never calls are groups of their own, at the end."""
    by_input: dict[int, list[str]] = {}
    alive: list[torch.Tensor] = []  # an input that was freed would give its address to the next

    def look(path: str, features: torch.Tensor) -> None:
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
    if not total.isfinite().all():
        raise UserError(
            f"calibration: {path} sees values that are not finite (in the type of activations of "
            "this device). Is model.source whole? Else set quantize.method: absmax"
        )
    return total / max(1, inputs)


def _with_inputs(
    parts: dict[str, nn.Module], look: Callable[[str, torch.Tensor], None], run: Run
) -> None:
    """Call `run`; whenever it calls one of the parts, `look` gets its path and its input."""
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs, path=path: look(path, inputs[0]))
        for path, part in parts.items()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
