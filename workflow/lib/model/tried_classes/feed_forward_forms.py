"""Which of a module's linears are gate, up and down of a gated feed-forward, found by trying its
class with small random linears in their places.

Families call them `gate_proj`, `up_proj`, `down_proj`, or `w1`, `w3`, `w2`, or make gate and up by
one `gate_up_proj`. So every order that their sizes allow is tried, with each activation."""

from collections.abc import Iterator
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import nn

from workflow.lib.kernels.rows.gating import ACTIVATIONS
from workflow.lib.model.fused_feed_forward import Form
from workflow.lib.model.tried_classes.magnitudes import agree, alike, magnitudes
from workflow.lib.model.tried_classes.stand_ins import stand_in_for, takes_one_tensor, tried

HIDDEN, WIDE, ROWS = 8, 6, 4  # of what a class is tried on
# Of the largest element of the output. The two formulas of the GELU are 2e-4 apart.
TOLERANCE = 1e-5


def feed_forward_form(module: nn.Module) -> Form | None:
    """Return the form of a module that is a gated feed-forward, None of any other."""
    linears, others = _children(module)
    if len(linears) not in (2, 3) or not takes_one_tensor(module):
        return None
    if any(True for child in others.values() for _ in child.parameters()):
        return None
    forms = (_form(module, into, down) for into, down in _orders(linears))
    return next((form for form in forms if form is not None), None)


def _children(module: nn.Module) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """Return the linears, quantized or adapted as they may be, and the other children."""
    linears: dict[str, Any] = {}
    others: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        of = linears if hasattr(child, "in_features") and hasattr(child, "out_features") else others
        of[name] = child
    return linears, others


def _orders(linears: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names of gate and up, or of one for both, and of down, by their sizes."""
    for *into, down in permutations(linears):
        width = linears[down].in_features * (3 - len(into))
        sizes = {(linears[name].in_features, linears[name].out_features) for name in into}
        if sizes == {(linears[down].out_features, width)}:
            yield tuple(into), down


def _form(module: nn.Module, into: tuple[str, ...], down: str) -> Form | None:
    """Return the form with these linears, None if the module's class computes something else."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=draw)
    made = [_linear(HIDDEN, 2 * WIDE // len(into), draw) for _ in into]
    last = _linear(WIDE, HIDDEN, draw)
    others = {name: stand_in_for(child) for name, child in _children(module)[1].items()}
    stand_in = stand_in_for(module)
    for name, child in (*others.items(), *zip(into, made, strict=True), (down, last)):
        setattr(stand_in, name, child)
    output = tried(stand_in.eval(), x)
    if output is None:
        return None
    at = magnitudes(module, *others.values())
    numbers = _numbers(module, *others.values())
    multipliers = (1.0, *numbers)

    def value(form: Form, magnitude: float) -> torch.Tensor:
        both = torch.cat([linear(magnitude * x) for linear in made], dim=-1)
        gate, up = both.chunk(2, dim=-1)
        y: torch.Tensor = last(form.gating.activated(gate) * up) * form.output_multiplier
        return y

    for activation, of_gate, of_output in product(ACTIVATIONS, multipliers, multipliers):
        form = Form(into, down, activation, of_gate, of_output)
        if agree(
            lambda magnitude: tried(stand_in, magnitude * x),
            partial(value, form),
            at=at,
            tolerance=TOLERANCE,
        ):
            dropout = _dropout(stand_in, x, output, numbers)
            return None if dropout is None else form._replace(dropout=dropout)
    return None


def _numbers(*modules: nn.Module) -> list[float]:
    """Return the numbers among modules' attributes: factors, or a share to drop."""
    found = {x for module in modules for x in vars(module).values() if isinstance(x, float)}
    return sorted(found - {1.0})


def _dropout(
    stand_in: nn.Module, x: torch.Tensor, output: torch.Tensor, numbers: list[float]
) -> float | None:
    """Return the share of the output that training drops; None if it does something else."""
    with torch.random.fork_rng(devices=[]):
        trained = tried(stand_in.train(), x)
    for share in (0.0, *(number for number in numbers if 0 < number < 1)):
        with torch.random.fork_rng(devices=[]):  # it begins where the one above began
            expected = nn.functional.dropout(output, share, training=True)
        if alike(trained, expected, tolerance=TOLERANCE):
            return share
    return None


def _linear(into: int, out: int, draw: torch.Generator) -> nn.Linear:
    """Return a linear whose output is about as large as its input."""
    linear = nn.Linear(into, out, device="meta")
    linear.weight = nn.Parameter(torch.randn(out, into, generator=draw) / into**0.5)
    linear.bias = nn.Parameter(torch.randn(out, generator=draw) / 2)
    return linear
