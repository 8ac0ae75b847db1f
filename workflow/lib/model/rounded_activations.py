"""Activations that backward needs, rounded to float8 (e4m3), on the device or on their way to the
host and back.

A saved tensor x becomes bytes x' with an fp32 scale for each block of 128 (or 64) neighbours of the
innermost dimension, so no token changes another's rounding. What nodes share is rounded once.

Not rounded is what would cost more than it saves: other types, tensors of less than an eighth of
the hidden states, scores and masks, what all layers get (cosine and sine), and the input that a
layer is recomputed from; nor queries and keys (`exact_activations`), whose weights backward makes
again and compares with the log-sum-exp. docs/numerics.md has figures."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from workflow.lib.kernels.eight_bits.rounding import Format, Rounded, restored, rounded
from workflow.lib.kernels.exact_activations import is_exact, keep_exact
from workflow.lib.model.activation_offload import ActivationOffload, Packed, dense, is_parameter

FLOAT8 = Format("float8", torch.float8_e4m3fn, 448.0, 128)
BLOCKS = (128, 64)  # tried in this order
ROW_BLOCKS = 32  # of a row of the kernel, which has 4,096 elements at a time
NARROWEST = 32  # elements of an innermost dimension: below, scales take more than they save
SMALLEST_SHARE = 8  # a tensor has at least one of so many parts of the hidden states' elements


class _Copy(NamedTuple):
    """The rounded copy of a tensor's bytes."""

    packed: Packed  # values and behind them scales, (num_bytes,) uint8
    size: tuple[int, int]  # rows and width of the values
    form: Format
    dtype: torch.dtype

    def restored(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the values times their scales, (rows x width,)."""
        copy = Rounded(*_parts(packed, self.size, self.form), self.form)
        return restored(copy, dtype=self.dtype).flatten()


class _View(NamedTuple):
    """One of the tensors that autograd has saved, which may share a copy."""

    copy: _Copy
    shape: torch.Size
    strides: tuple[int, ...]


class RoundedActivations:
    """Takes what decoder layers save in forward, and gives it back rounded to backward."""

    def __init__(self, dtype: torch.dtype, stash: ActivationOffload | None) -> None:
        """dtype: of what is rounded; stash: where bytes wait, None for where they are."""
        self._dtype, self._stash = dtype, stash
        self._copies: WeakKeyDictionary[torch.UntypedStorage, dict[Any, _Copy]]
        self._copies = WeakKeyDictionary()
        """By the memory that they were made of, and the part and version of it."""
        self._inside, self._smallest, self._seq_len = False, 0, 0

    def follow_(self, layers: Sequence[nn.Module]) -> None:
        """Round what these layers save, none of which may be recomputed; nothing between them."""
        for layer in layers:
            layer.register_forward_pre_hook(self._layer_begins, with_kwargs=True)
            layer.register_forward_hook(self._layer_ends)

    def _layer_begins(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(kwargs)
        first = [named.pop("hidden_states")] if "hidden_states" in named else []
        given: list[Any] = [*first, *args, *named.values()]
        hidden, others = given[0], given[1:]
        self._smallest, self._seq_len = hidden.numel() // SMALLEST_SHARE, hidden.shape[-2]
        alike = (x for x in tree_iter(others) if isinstance(x, torch.Tensor) and x is not hidden)
        keep_exact(*alike)
        self._inside = True

    def _layer_ends(self, *_: Any) -> None:
        self._inside = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within the block take what autograd saves."""
        self._inside = False
        stash = self._stash
        one_pass: AbstractContextManager[None] = stash.one_pass() if stash else nullcontext()
        with one_pass, saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._copies.clear()

    def _pack(self, tensor: torch.Tensor) -> "_View | Packed":
        if not self._rounds(tensor):
            return self._stash.pack(tensor) if self._stash else tensor
        values = dense(tensor.detach())
        copies = self._copies.setdefault(values.untyped_storage(), {})
        key = (values.storage_offset(), values.numel(), values._version)
        copy = copies.get(key)
        if copy is None:
            copy = copies[key] = self._rounded(values)
        elif self._stash:
            self._stash.pack_again(copy.packed)
        return _View(copy, values.shape, values.stride())

    def _rounds(self, tensor: torch.Tensor) -> bool:
        if not self._inside or tensor.dtype != self._dtype or is_parameter(tensor):
            return False
        num_elements = tensor.numel()
        if num_elements < self._smallest or _innermost(tensor) < NARROWEST:
            return False
        expanded = tensor.untyped_storage().nbytes() < num_elements * tensor.element_size()
        return not (expanded or self._by_heads(tensor) or is_exact(tensor))

    def _by_heads(self, tensor: torch.Tensor) -> bool:
        """Whether (rows, heads, seq_len, ...) holds pairs of tokens, or repeated keys or values."""
        if tensor.dim() != 4 or tensor.shape[2] != self._seq_len:
            return False
        return tensor.shape[3] == self._seq_len or tensor.is_contiguous()

    def _rounded(self, values: torch.Tensor) -> _Copy:
        """Return the copy of a tensor without gaps."""
        size, block = _rows(values)
        form = FLOAT8._replace(block=block)
        scale_bytes = 4 * size[0] * math.ceil(size[1] / block)
        # One tensor for both, so that one copy takes them to the host.
        num_bytes = _aligned(values.numel()) + scale_bytes
        packed = torch.empty(num_bytes, dtype=torch.uint8, device=values.device)
        rounded(values.as_strided(size, (size[1], 1)), form, into=_parts(packed, size, form))
        return _Copy(self._stash.pack(packed) if self._stash else packed, size, form, values.dtype)

    def _unpack(self, packed: "_View | Packed") -> torch.Tensor:
        if isinstance(packed, _View):
            there = packed.copy.packed
            values = self._stash.unpack(there) if self._stash else there
            assert isinstance(values, torch.Tensor)
            return packed.copy.restored(values).as_strided(packed.shape, packed.strides)
        if self._stash is None:
            assert isinstance(packed, torch.Tensor), "there is nowhere else"
            return packed
        return self._stash.unpack(packed)


def _innermost(tensor: torch.Tensor) -> int:
    """Return the size of the dimension whose elements are neighbours in memory, 1 for none."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return max((size for size, stride in sizes if stride == 1), default=1)


def _rows(values: torch.Tensor) -> tuple[tuple[int, int], int]:
    """Return as which rows and width a tensor without gaps is rounded, and the size of a block."""
    count, width = values.numel(), _innermost(values)
    for block in BLOCKS:
        if width % block == 0:
            width = block * math.gcd(count // block, ROW_BLOCKS)
            return (count // width, width), block
    return (count // width, width), BLOCKS[0]


def _parts(
    packed: torch.Tensor, size: tuple[int, int], form: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales (rows, blocks) as they lie in bytes."""
    num_values = size[0] * size[1]
    values = packed[:num_values].view(form.dtype).view(size)
    scales = packed[_aligned(num_values) :].view(torch.float32)
    return values, scales.view(size[0], -1)


def _aligned(num_bytes: int) -> int:
    """Return where numbers of fp32 may begin behind so many bytes."""
    return -(-num_bytes // 16) * 16
