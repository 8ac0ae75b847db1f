"""Which decoder layers a lever takes when it takes some of them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerChoice:
    """The decoder layers, by number, that the levers of a plan take."""

    recomputed: Sequence[int]
    activations_on_host: Sequence[int]
    weights_on_host: Sequence[int]

    def among(self, numbers: Sequence[int]) -> "LayerChoice":
        """Return the choice for a model of these layers alone, numbered anew."""
        places = {number: place for place, number in enumerate(numbers)}
        taken = (self.recomputed, self.activations_on_host, self.weights_on_host)
        return LayerChoice(*([places[x] for x in layers if x in places] for layers in taken))


def choose_layers(
    num_layers: int, *, recomputed_every: int, offload_activations: bool | int, offload_layers: int
) -> LayerChoice:
    """Return what the levers of a plan take of so many layers; recomputed_every: 0 = none."""
    return LayerChoice(
        range(0, num_layers, recomputed_every) if recomputed_every else (),
        activation_offload_layers(
            offload_activations, recomputed_every=recomputed_every, num_layers=num_layers
        ),
        spread(offload_layers, num_layers),
    )


def spread(count: int, total: int) -> list[int]:
    """Return `count` of the numbers 0 to `total` - 1, spread evenly; up to half of them are never
    neighbours.
    """
    return [(2 * index + 1) * total // (2 * count) for index in range(count)]


def activation_offload_layers(
    wanted: bool | int, *, recomputed_every: int, num_layers: int
) -> list[int]:
    """Return the decoder layers whose activations wait in host memory: all (True), none, or up to
    `wanted` of them.

    First come those that are not recomputed, spread evenly and the last one last, whose backward
    follows at once.
    recomputed_every: 0 = none is recomputed.
    """
    if wanted is True:
        return [*range(num_layers)]
    recomputed = [*range(0, num_layers, recomputed_every)] if recomputed_every else []
    whole = sorted({*range(num_layers)} - {*recomputed})
    first = min(int(wanted), len(whole))
    then = min(int(wanted) - first, len(recomputed))
    return sorted(_from_the_first(whole, first) + _from_the_first(recomputed, then))


def _from_the_first(numbers: list[int], count: int) -> list[int]:
    return [numbers[index * len(numbers) // count] for index in range(count)]
