"""The mask of packed rows as one number a query: the first key that it sees.

A query sees the keys from `first[query]` to itself. Documents, sliding windows and chunks differ in
that number alone, so one compiled kernel serves all of them, and nothing grows with S x S elements:
a block mask has a few integers for each pair of blocks of 128 tokens (FlexAttention, arXiv
2412.05496, sec. 3.3)."""

from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from workflow.lib.kernels.attention.answer_rows import (
    LengthGroup,
    computed_keys,
    equal_lengths,
)
from workflow.lib.kernels.attention.attention_choice import FLEX_BLOCK


class MaskKind(NamedTuple):
    """Limits of attention within a document, besides the order of tokens."""

    window: int | None = None  # tokens that a query sees, itself included
    chunk: int | None = None
    """Tokens of a chunk, counted from the document's start; a query sees its own chunk alone."""


# Of a recording's documents. Their bounds have no values there, and kernels of a graph get the
# longest document of any micro-batch.
RECORDED_LENGTHS: ContextVar[tuple[LengthGroup, ...]] = ContextVar("recorded_lengths", default=())


def seen_keys(longest: float, window: int | None, chunk: int | None = None) -> float:
    """Return `computed_keys` of a recording's documents. Without a recording all documents count as
    long as the longest."""
    return computed_keys(RECORDED_LENGTHS.get() or equal_lengths(longest), window, chunk)


class PackedMasks:
    """The masks of a micro-batch, each made once for all layers of its kind."""

    def __init__(self, position_ids: torch.Tensor, longest: int | None = None) -> None:
        """position_ids: (rows, seq_len); a 0 starts a document, and every row starts with one.
        longest: tokens of the longest document, or None for a row."""
        self._longest = longest or position_ids.shape[1]
        self._position_ids = position_ids
        self._first: dict[MaskKind, torch.Tensor] = {}
        self._blocks: dict[MaskKind, BlockMask] = {}

    def first_keys(self, kind: MaskKind) -> torch.Tensor:
        if kind not in self._first:
            self._first[kind] = first_keys(self._position_ids, kind)
        return self._first[kind]

    def seen_keys(self, kind: MaskKind) -> float:
        """Return the average keys that are computed for a query."""
        return seen_keys(self._longest, kind.window, kind.chunk)

    def block_mask(self, kind: MaskKind) -> BlockMask:
        if kind not in self._blocks:
            self._blocks[kind] = block_mask(self.first_keys(kind))
        return self._blocks[kind]


def first_keys(position_ids: torch.Tensor, kind: MaskKind) -> torch.Tensor:
    """Return the first key (rows, seq_len) int32, as its place in the row, that each query sees.
    position_ids: (rows, seq_len), from 0 in each document. The result never falls along a row."""
    positions = torch.arange(position_ids.shape[1], device=position_ids.device)
    first = positions - position_ids
    if kind.window is not None:
        first = first.maximum(positions - kind.window + 1)
    if kind.chunk is not None:
        first = first.maximum(positions - position_ids % kind.chunk)
    return first.to(torch.int32)


def block_mask(first: torch.Tensor) -> BlockMask:
    """Return `first` (rows, seq_len) as a block mask of torch's flex_attention. A block of queries
    sees blocks of keys in one range that ends with itself. Blocks that all of its queries see whole
    are listed apart: the kernel does not read `first` there."""
    rows, length = first.shape
    count = -(-length // FLEX_BLOCK)
    # Queries beyond the end see the keys of the last one; the kernels drop their results.
    padded = torch.cat([first, first[:, -1:].expand(-1, count * FLEX_BLOCK - length)], dim=1)
    blocks = padded.view(rows, 1, count, FLEX_BLOCK)
    own = torch.arange(count, device=first.device, dtype=torch.int32)
    lowest = blocks[..., 0] // FLEX_BLOCK
    whole = (-(-blocks[..., -1] // FLEX_BLOCK)).minimum(own)  # of the diagonal's half is hidden
    if length % FLEX_BLOCK:  # kernels check each key of an incomplete block
        whole[..., -1] = count - 1
    before = whole - lowest  # partly seen blocks, besides the diagonal's
    columns = own.expand(rows, 1, count, count)
    partial = torch.where(columns < before[..., None], columns + lowest[..., None], own[:, None])

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (k >= padded[b, q])

    return BlockMask.from_kv_blocks(
        before + 1,
        partial,
        own - whole,
        (whole[..., None] + columns).clamp(max=count - 1),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )
