"""The code of a family's class or function: its own, and what it names of its file and class."""

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any


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
