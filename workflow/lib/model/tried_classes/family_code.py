"""The code of a family's class or function: its own, and what it names of its file and class.

It tells which linears' values a family changes in place: `query_states.clamp_(...)`, `hidden_states
*= 2`. A value may be changed after its node, unless the node keeps it for backward, as with DoRA:
such a linear then gives a copy. That costs a copy too many where something else is changed; at run
time it would be found too late."""

import dis
import functools
import inspect
from collections.abc import Iterator
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
        known: Any = function.__globals__.get(name) or getattr(owner, name, None)
        called = inspect.unwrap(known)
        if getattr(called, "__module__", None) == function.__module__:
            yield from _codes(called, owner, seen)


def note_changes_in_place_(layer: nn.Module) -> None:
    """Tell adapted linears of a layer whether a module around them changes tensors in place."""
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
