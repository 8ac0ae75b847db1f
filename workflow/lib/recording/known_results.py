"""Results of operations on the recorded GPU, in a tenth of torch's time for fake ones.

A view's own kernel makes it, on meta tensors. Of all other operations torch makes the first result,
and later ones on operands of the same shapes are copies of its form, except results whose shape
depends on values, and those that are no tensors."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

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
LIBRARIES = ("aten", "fsdp")
META = torch.device("meta")
PLAIN = frozenset(
    {
        *(bool, int, float, str, type(None)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


class _UnknownError(Exception):
    """The signature of an operand does not decide the result, or the result's kind is unknown."""


@dataclass(frozen=True)
class _Fresh:
    """A result in memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Window:
    """A result in the memory of the operand of this number or name."""

    operand: int | str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Written:
    """The operand itself, changed in place."""

    operand: int | str


_Form = _Fresh | _Window | _Written | tuple["_Form", ...] | None


class KnownResults:
    """Calls operations on the fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._forms: dict[Hashable, _Form] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Attributes of every fake tensor of a device."""

    def call(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the result of `func(*args, **options)`."""
        try:
            if func in VIEWS:
                return self._view(func, args, options)
            if not _repeats(func):
                return func(*args, **options)
            key = (func, torch.get_default_dtype(), self._looks(args), self._looks(options))
        except _UnknownError:
            return func(*args, **options)
        operands = dict(enumerate(args)) | dict(options)
        if key in self._forms:
            return self._made(self._forms[key], operands)
        result = func(*args, **options)
        with suppress(_UnknownError):
            self._forms[key] = self._form(result, operands, set())
        return result

    def _looks(self, operand: Any) -> Hashable:
        """Return everything of an operand that can decide the shape and the dtype of a result."""
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
        if kind in (torch.Tensor, torch.nn.Parameter) and operand.is_meta:
            return META, operand.shape, operand.stride(), operand.dtype
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
            return self._fake(views, device)
        return [self._fake(view, device) for view in views]

    def _form(self, result: Any, operands: Mapping[int | str, Any], taken: set[int]) -> _Form:
        """Return the form of a result; taken: memory of others, to which its own is added."""
        if result is None:
            return None
        if type(result) is tuple:
            return tuple(self._form(one, operands, taken) for one in result)
        if type(result) is not FakeTensor:
            raise _UnknownError
        self._check_ours(result)
        for name, operand in operands.items():
            if result is operand:
                return _Written(name)
        return self._in_memory(result, operands, taken)

    def _in_memory(
        self, result: FakeTensor, operands: Mapping[int | str, Any], taken: set[int]
    ) -> _Form:
        storage = result.untyped_storage()
        form: _Form
        for name, operand in operands.items():
            if isinstance(operand, FakeTensor) and _memory(operand) == storage._cdata:
                form = _Window(name, result.shape, result.stride(), int(result.storage_offset()))
                break
        else:
            inside = {_memory(tensor) for tensor in tensors(operands)}
            if storage._cdata in inside | taken or result.storage_offset():
                raise _UnknownError
            taken.add(storage._cdata)
            form = _Fresh(result.shape, result.stride(), result.dtype, result.fake_device)
        self._check_alike(self._made(form, operands), result)
        return form

    def _check_alike(self, made: FakeTensor, result: FakeTensor) -> None:
        same = made.untyped_storage().nbytes() == result.untyped_storage().nbytes()
        if not same or self._looks(made) != self._looks(result):
            raise _UnknownError

    def _made(self, form: _Form, operands: Mapping[int | str, Any]) -> Any:
        if form is None:
            return None
        if isinstance(form, tuple):
            return tuple(self._made(one, operands) for one in form)
        if isinstance(form, _Written):
            return operands[form.operand]
        if isinstance(form, _Window):
            window = (form.shape, form.stride, form.offset)
            return self._view(aten.as_strided.default, (operands[form.operand], *window), {})
        with in_kernel_invocation_manager(self._mode):
            memory = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=META)
        return self._fake(memory, form.device)

    def _fake(self, memory: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return `FakeTensor(mode, memory, device)`."""
        if device not in self._attributes:
            made = FakeTensor(self._mode, memory, device)
            self._attributes[device] = dict(vars(made))
            return made
        made = torch.Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes[device])
        return made


def _memory(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


@cache
def _repeats(func: Any) -> bool:
    """Whether the operands' signatures decide the results'."""
    return func.namespace in LIBRARIES and LEFT_TO_TORCH.isdisjoint(func.tags)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's operands or results."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple | dict):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(branch)
