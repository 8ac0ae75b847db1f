"""Packed rows, split into documents and joined again.

Documents of similar length form a group, padded at their ends by the last token: causal layers do
not see that, and its gradient is 0. Indices are computed on the host. Shapes follow the lengths, or
a `DocumentCapacity`, which is the same for all micro-batches, as CUDA graphs need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

DocumentCapacity = tuple[int, ...]
"""The numbers of documents with at least 1, 2, 4, 8, ... tokens, each up to the longest allowed."""
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """Indices of packed rows and rows of single documents. lengths: of each document, T tokens in
    all. shapes: documents and padded length by group, P positions in all. positions: (P,) int64,
    the token at each; order: (T,) int64, each token's position; both None where documents are rows
    already."""

    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    positions: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Documents":
        """Return the same with `change` applied to its tensors."""
        if self.positions is None or self.order is None:
            return self
        return Documents(self.lengths, self.shapes, change(self.positions), change(self.order))

    def are_rows(self, shape: Sequence[int]) -> bool:
        """Whether each row of a tensor of this shape (rows, tokens, ...) is one document."""
        return self.positions is None and self.shapes == (tuple(shape[:2]),)

    def apart(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Split packed rows (1 or rows, tokens, ...) by group: (documents, length, ...)."""
        rows = sum(self.lengths) // x.shape[1]
        flat = x.expand(rows, *x.shape[1:]).flatten(0, 1)
        if self.positions is None:
            return [flat.unflatten(0, self.shapes[0])]
        at_positions: torch.Tensor = _Apart.apply(flat, self.positions, self.order)  # type: ignore[no-untyped-call]
        parts = at_positions.split([count * length for count, length in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def together(self, parts: Sequence[torch.Tensor], rows: torch.Size) -> torch.Tensor:
        """Join the outputs of all groups to packed rows (*rows, ...)."""
        whole = torch.cat([part.flatten(0, 1) for part in parts]) if len(parts) > 1 else parts[0]
        if self.order is not None:
            flat = whole if len(parts) > 1 else whole.flatten(0, 1)
            whole = _Together.apply(flat, self.order)  # type: ignore[no-untyped-call]
        return whole.reshape(*rows, *parts[0].shape[2:])

    def starts(self, device: torch.device) -> list[torch.Tensor]:
        """Return the first token (documents,) int64 of each document by group."""
        if self.positions is None:
            count, length = self.shapes[0]
            return [torch.arange(count, device=device) * length]
        parts = self.positions.split([count * length for count, length in self.shapes])
        return [part[::length] for part, (_, length) in zip(parts, self.shapes, strict=True)]


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, positions: torch.Tensor, order: torch.Tensor
    ) -> torch.Tensor:
        ctx.order = order
        return tokens.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].index_select(0, ctx.order), None, None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, at_positions: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.order, ctx.shape = order, at_positions.shape
        return at_positions.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].new_zeros(ctx.shape).index_copy_(0, ctx.order, grads[0]), None


def document_capacity(lengths: Sequence[int], *, longest: int) -> DocumentCapacity:
    """Return the capacity for documents of these lengths; longest: bound of a document's length."""
    sizes = np.asarray(lengths)
    return tuple(int((sizes >= 2**digit).sum()) for digit in range(longest.bit_length()))


def capacity_tokens(capacity: DocumentCapacity, *, longest: int) -> int:
    """Return the tokens of a capacity with all padding."""
    return sum(count * length for count, length in _shapes_in(capacity, longest))


def documents_of(
    lengths: Sequence[int], *, capacity: DocumentCapacity = (), longest: int | None = None
) -> Documents:
    """Return the documents of these lengths, in order, on the host. capacity: its groups alone,
    each document in the shortest with space; longest: bound of a document's length."""
    sizes = np.asarray(lengths, dtype=np.int64)
    own = tuple(sizes.tolist())
    if not capacity and (sizes == sizes[0]).all():
        return Documents(own, ((len(sizes), own[0]),))
    by_length = np.argsort(-sizes, kind="stable")
    most = longest or sum(own)
    shapes = _shapes_in(capacity, most) if capacity else _shapes_of(sizes[by_length])
    positions, order = _positions(sizes, by_length, shapes)
    return Documents(own, shapes, torch.from_numpy(positions), torch.from_numpy(order))


def _shapes_of(falling: Numbers) -> tuple[tuple[int, int], ...]:
    """Return groups by the binary digits of lengths: padding is under half of the positions."""
    digits = [int(length).bit_length() for length in falling]
    firsts = [digits.index(digit) for digit in sorted({*digits}, reverse=True)]
    return tuple((digits.count(digits[first]), int(falling[first])) for first in firsts)


def _shapes_in(capacity: DocumentCapacity, longest: int) -> tuple[tuple[int, int], ...]:
    """Return the groups of a capacity, long documents first."""
    counts = [
        more - still_more for more, still_more in zip(capacity, (*capacity[1:], 0), strict=True)
    ]
    lengths = [min(2 ** (digit + 1), longest) for digit in range(len(capacity))]
    pairs = zip(reversed(counts), reversed(lengths), strict=True)
    return tuple((count, length) for count, length in pairs if count)


def _positions(
    sizes: Numbers, by_length: Numbers, shapes: tuple[tuple[int, int], ...]
) -> tuple[Numbers, Numbers]:
    """Return `Documents.positions` and `order`; the k-th longest document has the k-th row."""
    widths = np.concatenate([np.full(count, length) for count, length in shapes])
    first, last = np.zeros_like(widths), np.zeros_like(widths)  # of an empty row: token 0
    begins, own = np.cumsum(sizes) - sizes, slice(len(sizes))
    first[own] = begins[by_length]
    last[own] = first[own] + sizes[by_length] - 1
    assert (last - first < widths).all(), "a document is longer than its group"
    offsets = np.cumsum(widths) - widths
    column = np.arange(widths.sum()) - np.repeat(offsets, widths)
    positions = np.minimum(np.repeat(first, widths) + column, np.repeat(last, widths))
    row_of = np.empty_like(by_length)
    row_of[by_length] = np.arange(len(sizes))
    order = np.arange(sizes.sum()) + np.repeat(offsets[row_of] - begins, sizes)
    return positions, order
