"""At which magnitudes what a family computes is compared with what is to take its place.

Small random values alone do not see a clamp: a feed-forward whose gate is cut at 10 looks like any
other. So each trial is repeated with its values multiplied: over six powers of ten, and by every
number that the module, its config or its code has, so that values fall on both sides of it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch

from workflow.lib.model.tried_classes.family_code import codes_of

POWERS = (2.0**-7, 2.0**-3, 1.0, 2.0**3, 2.0**7, 2.0**13)
MOST = POWERS[-1]  # beyond, squares and cubes of values end what float32 can tell apart


def magnitudes(*owners: Any) -> list[float]:
    """Return factors of values: 1, then what numbers of the modules ask for, and powers."""
    numbers = {abs(x) for owner in owners for x in _numbers_of(owner)}
    asked = {x for x in numbers if POWERS[0] < x < MOST}
    return [1.0, *sorted({*asked, *POWERS} - {1.0})]


def alike(found: Any, expected: Any, *, tolerance: float) -> bool:
    """Whether tensors, or tuples, have the same shapes and differ by `tolerance` of the largest."""
    if isinstance(expected, tuple):
        parts = isinstance(found, tuple) and len(found) == len(expected)
        return parts and all(
            alike(x, y, tolerance=tolerance) for x, y in zip(found, expected, strict=True)
        )
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    bound = tolerance * float(expected.abs().max())
    return torch.allclose(found, expected, rtol=0.0, atol=bound)


def agree(
    theirs: Callable[[float], Any],
    ours: Callable[[float], Any],
    *,
    at: Iterable[float],
    tolerance: float,
) -> bool:
    """Whether two computations of values of a magnitude are `alike` at all of these."""
    with torch.no_grad():
        return all(alike(theirs(x), ours(x), tolerance=tolerance) for x in at)


def _numbers_of(owner: Any) -> Iterator[float]:
    """Yield the floats of a module's (or a method's module's) attributes, config and code."""
    module = getattr(owner, "__self__", owner)
    kind: Any = type(module)
    forward = owner if owner is not module else getattr(kind, "forward", owner)
    for code in codes_of(getattr(forward, "__func__", forward), kind):
        yield from _floats(code.co_consts)
    yield from _floats({name: x for name, x in vars(module).items() if name[:1] != "_"})
    config = getattr(module, "config", None)
    if config is not None:
        yield from _floats(config.to_dict() if hasattr(config, "to_dict") else vars(config))


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, CodeType):  # of a function within a function
        value = value.co_consts
    if isinstance(value, list | tuple | frozenset):
        for part in value:
            yield from _floats(part)
    elif type(value) is float and math.isfinite(value):
        yield value
    elif type(value) is int:  # a limit may be written without its point
        yield float(value)
