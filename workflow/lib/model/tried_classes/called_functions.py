"""Replacement of functions that a module's forward calls by name: the module gets a subclass whose
forward is a copy with replacements under those names."""

import functools
import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

from torch import nn

Replace = Callable[[FunctionType], Callable[..., Any] | None]


def replace_called_functions_(module: nn.Module, replacement: Replace) -> bool:
    """Replace functions that a module's forward calls. `replacement` maps each function of its file
    to its replacement or None. Return whether any was replaced."""
    kind: Any = type(module)
    calling = _calling_class(kind, replacement)
    if calling is not None:
        module.__class__ = calling
    return calling is not None


@functools.cache
def _calling_class(kind: Any, replacement: Replace) -> type[nn.Module] | None:
    """Return the subclass of a family's class, None if its forward calls no such function."""
    if not isinstance(kind.forward, FunctionType):
        return None
    forward: Any = inspect.unwrap(kind.forward, stop=lambda function: _held(function) is None)
    called = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    replacements = {
        name: replacement(x) for name, x in called.items() if isinstance(x, FunctionType)
    }
    names = {name: x for name, x in replacements.items() if x is not None}
    if not names:
        return None
    # A search for the family's own class searches the file of the class.
    members = {"forward": _with_names(kind.forward, names), "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


def _held(function: Any) -> Any:
    """Return the function inside a decorator's function, None of any other."""
    inner = getattr(function, "__wrapped__", None)
    cells = function.__closure__ or ()
    return inner if any(cell.cell_contents is inner for cell in cells) else None


def _with_names(function: Any, names: dict[str, Any]) -> FunctionType:
    """Return a copy of a function (also decorated) with other values for these globals."""
    inner, closure = _held(function), function.__closure__
    copied = None if inner is None else _with_names(inner, names)
    if copied is not None:
        cells = [copied if cell.cell_contents is inner else cell.cell_contents for cell in closure]
        closure = tuple(map(CellType, cells))
    copy = FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        closure,
    )
    functools.update_wrapper(copy, function)
    copy.__kwdefaults__ = function.__kwdefaults__
    del copy.__wrapped__  # type: ignore[attr-defined]
    if copied is not None:
        copy.__wrapped__ = copied  # type: ignore[attr-defined]
    return copy
