"""Gated RMS norms of recurrent layers, found by what they compute: whether the gate comes first,
and how many groups a row has (`kernels.rows.gated_norm`)."""

import inspect
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from workflow.lib.kernels.rows.gated_norm import GatedNorm, by_torch
from workflow.lib.model.tried_classes.magnitudes import agree, magnitudes
from workflow.lib.model.tried_classes.stand_ins import stand_in_for, tried

TOLERANCE = 1e-4
ROWS = 3


def as_gated_norm(module: nn.Module) -> GatedNorm | None:
    """Return the fused norm of a module that is a gated RMS norm, None of any other."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    params: dict[str, Any] = dict(module.named_parameters())
    takes = len(inspect.signature(type(module).forward).parameters)  # self is the first
    if [*params] != ["weight"] or list(module.children()) or not isinstance(eps, float):
        return None
    if takes != 3 or params["weight"].dim() != 1:
        return None
    draw = torch.Generator().manual_seed(0)
    width = params["weight"].shape[0]
    x, gate = torch.randn(2, 1, ROWS, width, generator=draw)
    drawn = torch.rand(width, generator=draw) + 0.5
    stand_in = stand_in_for(module)

    def theirs(magnitude: float) -> torch.Tensor | None:
        weight = nn.Parameter(magnitude * drawn)
        stand_in.register_parameter("weight", weight)
        return tried(stand_in, magnitude * x, magnitude * gate)

    def ours(options: dict[str, Any], magnitude: float) -> torch.Tensor:
        norm = GatedNorm(nn.Parameter(magnitude * drawn), **options)
        return by_torch(magnitude * x, magnitude * gate, norm)

    at = magnitudes(module)
    for groups, gate_first in product(_counts(module, width), (True, False)):
        options: dict[str, Any] = {"eps": eps, "groups": groups, "gate_first": gate_first}
        if agree(theirs, partial(ours, options), at=at, tolerance=TOLERANCE):
            return GatedNorm(params["weight"], **options)
    return None


def _counts(module: nn.Module, width: int) -> list[int]:
    """Return how many groups a row may have: numbers among the attributes are groups or columns."""
    numbers = [x for x in vars(module).values() if type(x) is int and x > 0 and width % x == 0]
    return sorted({1, *numbers, *(width // x for x in numbers)})
