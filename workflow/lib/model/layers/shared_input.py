"""Linears of one module that take the same input, by one node, whoever calls them.

The first that is called computes all, and leaves the others' values on the input until they are
called with it. So the input is read once for all their adapters, in backward it is made again once
where it came from a norm, and its gradients are added by the matmuls themselves."""

from collections.abc import Sequence
from typing import Any

import torch

from workflow.lib.model.layers.nf4_lora_matmul import nf4_lora_matmuls

# attribute of an input: the values that wait on it by layer, and the input's version then
VALUES = "workflow_values"


class SharedInput:
    """`FusedLoraLinear`s that a module calls with the same tensor."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = tuple(layers)

    def value(self, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a layer for x (..., in_features); None where one node cannot."""
        waiting, version = getattr(x, VALUES, ({}, None))
        if layer in waiting and version == x._version:
            value: torch.Tensor = waiting.pop(layer)
            return value
        if not all(each.can_share_node() for each in self._layers):
            return None
        made = dict(zip(self._layers, nf4_lora_matmuls(x, self._layers), strict=True))
        value = made.pop(layer)
        setattr(x, VALUES, (made, x._version))
        return value


def share_input_(layers: Sequence[Any]) -> None:
    """Have layers compute their values together; one alone has nothing to share."""
    shared = SharedInput(layers) if len(layers) > 1 else None
    for layer in layers:
        layer.beside = shared
