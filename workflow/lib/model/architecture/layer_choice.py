"""Decoder layers of a memory option that takes only some of them."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

# All layers, none, every k-th, or a share of them.
Recomputation = bool | int | float


class LayerChoice(NamedTuple):
    """The decoder layers, by number, of a plan's memory options."""

    recomputed: Sequence[int]
    activations_on_host: Sequence[int]
    weights_on_host: Sequence[int]
    decoded: Sequence[int]  # their frozen weights stay decoded

    def among(self, numbers: Sequence[int]) -> "LayerChoice":
        """Return the choice for a model of these layers alone, renumbered."""
        indices = {number: index for index, number in enumerate(numbers)}
        return LayerChoice(*([indices[x] for x in layers if x in indices] for layers in self))


def recomputed_share(recomputation: Recomputation) -> Fraction:
    """Return the share of the layers that is recomputed."""
    if isinstance(recomputation, float):
        return Fraction(str(recomputation))
    return Fraction(1, int(recomputation)) if recomputation else Fraction(0)


@cache
def is_recomputed(recomputation: Recomputation, layer: int) -> bool:
    """Return whether backward recomputes a layer: the first one, and others evenly spread."""
    share = recomputed_share(recomputation)
    return math.ceil((layer + 1) * share) > math.ceil(layer * share)


def recomputed_layers(recomputation: Recomputation, num_layers: int) -> list[int]:
    """Return the numbers of the decoder layers that backward recomputes."""
    return [layer for layer in range(num_layers) if is_recomputed(recomputation, layer)]


def spread(count: int, total: int) -> list[int]:
    """Return `count` of the numbers below `total`, spread evenly; up to half: never neighbours."""
    return [(2 * index + 1) * total // (2 * count) for index in range(count)]


def activation_offload_layers(
    wanted: bool | int, *, recomputation: Recomputation, num_layers: int
) -> list[int]:
    """Return the decoder layers with offloaded activations: all (True), or up to `wanted`, spread
    evenly. Layers that are not recomputed come first."""
    if wanted is True:
        return [*range(num_layers)]
    recomputed = recomputed_layers(recomputation, num_layers)
    whole = sorted({*range(num_layers)} - {*recomputed})
    first = min(int(wanted), len(whole))
    then = min(int(wanted) - first, len(recomputed))
    return sorted(_from_the_first(whole, first) + _from_the_first(recomputed, then))


def _from_the_first(numbers: list[int], count: int) -> list[int]:
    return [numbers[index * len(numbers) // count] for index in range(count)]
