"""Which decoder layers a lever takes when it takes some of them."""


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
