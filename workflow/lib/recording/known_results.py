"""Results of operations on the recorded GPU, in a fraction of the time that torch takes for fake
ones.

Most operations of a recording have been seen before, on operands of the same shapes. torch keeps
what it has found too, but to look it up takes it longer than all else in a recording. Here a view
is made by its own kernel, on meta tensors. Of all other operations the first result is torch's, and
the next ones are made like it. What could be another one next time is left to torch: results whose
shape depends on values, and operations of other libraries.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

aten = torch.ops.aten
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten.view.dtype,
    }
)
LEFT_TO_TORCH = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)
PLAIN = frozenset(
    {
        *(bool, int, float, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


class _UnknownError(Exception):
    """The looks of an operand do not decide the result, or the result is of no known kind."""


@dataclass(frozen=True)
class _Fresh:
    """A result in memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Written:
    """The operand of this number, which the operation has changed."""

    number: int


_Known = _Fresh | _Written | tuple[_Fresh, ...] | None


class KnownResults:
    """Calls operations on the fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Hashable, _Known] = {}

    def call(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return what `func(*args, **options)` does."""
        try:
            if func in VIEWS:
                return self._view(func, args, options)
            if not _repeats(func):
                return func(*args, **options)
            key = (func, torch.get_default_dtype(), self._looks(args), self._looks(options))
        except _UnknownError:
            return func(*args, **options)
        if key in self._known:
            return self._made(self._known[key], args)
        result = func(*args, **options)
        with suppress(_UnknownError):
            self._known[key] = self._found(result, (args, options))
        return result

    def _looks(self, operand: Any) -> Hashable:
        """Return all of an operand that can decide the shape and the type of a result."""
        kind = type(operand)
        if kind is FakeTensor:
            self._check_ours(operand)
            return (
                operand.shape,
                operand.stride(),
                operand.storage_offset(),
                operand.dtype,
                operand.fake_device,
                operand.requires_grad,
            )
        if kind in PLAIN:
            return kind, operand  # 1, 1.0 and True are equal
        if kind is list or kind is tuple:
            return kind, *[self._looks(one) for one in operand]
        if isinstance(operand, Mapping):
            return *operand, *[self._looks(one) for one in operand.values()]
        raise _UnknownError

    def _check_ours(self, tensor: FakeTensor) -> None:
        if tensor.fake_mode is not self._mode or tensor.constant is not None:
            raise _UnknownError

    def _view(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        viewed = args[0]
        if type(viewed) is not FakeTensor:
            raise _UnknownError
        self._check_ours(viewed)
        with in_kernel_invocation_manager(self._mode):
            views = func(*args, **options)
        device = viewed.fake_device
        if isinstance(views, torch.Tensor):
            return FakeTensor(self._mode, views, device)
        return [FakeTensor(self._mode, view, device) for view in views]

    def _found(self, result: Any, operands: tuple[Sequence[Any], Mapping[str, Any]]) -> _Known:
        """Return how to make a result once more."""
        if result is None:
            return None
        for number, operand in enumerate(operands[0]):
            if result is operand:
                return _Written(number)
        taken = {tensor.untyped_storage()._cdata for tensor in tensors(operands)}
        if isinstance(result, tuple):
            return tuple(self._fresh(one, taken) for one in result)
        return self._fresh(result, taken)

    def _fresh(self, result: Any, taken: set[int]) -> _Fresh:
        """Describe a result; taken: the memory that it must not have, to which it is added."""
        if type(result) is not FakeTensor:
            raise _UnknownError
        self._check_ours(result)
        known = _Fresh(result.shape, result.stride(), result.dtype, result.fake_device)
        storage = result.untyped_storage()
        alike = self._made(known, ()).untyped_storage().nbytes() == storage.nbytes()
        if storage._cdata in taken or not alike or result.storage_offset() or result.requires_grad:
            raise _UnknownError
        taken.add(storage._cdata)
        return known

    def _made(self, known: _Known, args: Sequence[Any]) -> Any:
        """Make a result."""
        if known is None:
            return None
        if isinstance(known, _Written):
            return args[known.number]
        if isinstance(known, tuple):
            return tuple(self._made(one, args) for one in known)
        with in_kernel_invocation_manager(self._mode):
            memory = torch.empty_strided(
                known.shape, known.stride, dtype=known.dtype, device="meta"
            )
        return FakeTensor(self._mode, memory, known.device)


@cache
def _repeats(func: Any) -> bool:
    """Whether the looks of an operation's operands decide those of its results."""
    return func.namespace == "aten" and LEFT_TO_TORCH.isdisjoint(func.tags) and not func.is_view


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among what an operation takes or gives."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple | dict):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(branch)
