"""Magnitudes at which a family's computation is compared with its replacement.

Small random values alone do not show a clamp: a feed-forward whose gate is cut at 10 looks like any
other. So each comparison is repeated with multiplied values: over six powers of ten, and by every
number of the module, its config or its code, so that values fall on both sides of it.

The code also shows which linears' values a family changes in place: `query_states.clamp_(...)`,
`hidden_states *= 2`. A value may be changed after its node, unless the node keeps it for backward,
as with DoRA: such a linear then gives a copy. The copy is useless where something else is changed;
at run time a change would be found too late."""

import dis
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from workflow.lib.model.layers.lora_linear import FusedLoraLinear


def codes_of(function: Any, owner: Any = None) -> list[CodeType]:
    """Return the codes of a function, and of others that it names in its file or `owner`."""
    return [*_codes(inspect.unwrap(function), owner, set())]


def _codes(function: Any, owner: Any, seen: set[Any]) -> Iterator[CodeType]:
    if not isinstance(function, FunctionType) or function in seen:
        return
    seen.add(function)
    yield function.__code__
    for name in function.__code__.co_names:
        member: Any = function.__globals__.get(name) or getattr(owner, name, None)
        called = inspect.unwrap(member)
        if getattr(called, "__module__", None) == function.__module__:
            yield from _codes(called, owner, seen)


def note_changes_in_place_(layer: nn.Module) -> None:
    """Mark adapted linears of a layer if a module around them changes tensors in place."""
    for path, linear in layer.named_modules():
        if isinstance(linear, FusedLoraLinear):
            names = path.split(".")
            around = [layer.get_submodule(".".join(names[:n])) for n in range(len(names))]
            kinds: list[Any] = [*map(type, around)]
            linear.changed_in_place = any(map(changes_in_place, kinds))


@functools.cache
def changes_in_place(kind: Any) -> bool:
    """Whether a class's forward, or a function of its file or class, changes values in place."""
    return any(map(_changes, codes_of(kind.forward, kind)))


def _changes(code: Any) -> bool:
    methods = (name for name in code.co_names if name.endswith("_") and not name.endswith("__"))
    by_method = any(hasattr(torch.Tensor, name) for name in methods)
    steps = dis.get_instructions(code)
    return by_method or any(x.opname == "BINARY_OP" and x.argrepr.endswith("=") for x in steps)


POWERS = (2.0**-7, 2.0**-3, 1.0, 2.0**3, 2.0**7, 2.0**13)
MOST = POWERS[-1]  # beyond it float32 cannot tell squares and cubes apart


def magnitudes(*owners: Any) -> list[float]:
    """Return factors of values: 1, then those from numbers of the modules, and powers of ten."""
    numbers = {abs(x) for owner in owners for x in _numbers_of(owner)}
    limits = {x for x in numbers if POWERS[0] < x < MOST}
    return [1.0, *sorted({*limits, *POWERS} - {1.0})]


def alike(result: Any, expected: Any, *, tolerance: float) -> bool:
    """Whether tensors, or tuples, have the same shapes and differ by `tolerance` of the largest."""
    if isinstance(expected, tuple):
        parts = isinstance(result, tuple) and len(result) == len(expected)
        return parts and all(
            alike(x, y, tolerance=tolerance) for x, y in zip(result, expected, strict=True)
        )
    if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
        return False
    bound = tolerance * float(expected.abs().max())
    return torch.allclose(result, expected, rtol=0.0, atol=bound)


def agree(
    family: Callable[[float], Any],
    engine: Callable[[float], Any],
    *,
    at: Iterable[float],
    tolerance: float,
) -> bool:
    """Whether two computations are `alike` at all of these magnitudes."""
    with torch.no_grad():
        return all(alike(family(x), engine(x), tolerance=tolerance) for x in at)


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
