"""Attention over rows that processes share (`RowCut`), by an exchange of heads (DeepSpeed Ulysses,
arXiv 2309.14509).

A process gives its tokens' queries, keys and values away for some heads of whole rows, and gets its
tokens' outputs back. So attention sees whole rows, of any documents, windows and scores. Numbers of
heads need not divide: the first processes have one more. Every process gets the heads of keys that
its queries need, and backward sums their gradients. All other layers compute a slice's tokens
alone. Sums over a document are sums over the group."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class RowCut:
    """A micro-batch's rows before their division. position_ids: (rows, seq_len), a multiple of the
    group's processes; positions: (n,) int64, in the flattened rows, of the states that predict this
    process's trained tokens."""

    group: dist.ProcessGroup
    position_ids: torch.Tensor
    positions: torch.Tensor

    @property
    def size(self) -> int:
        """Processes that share a row."""
        return self.group.size()

    @property
    def first(self) -> int:
        """Position in a row of this process's first token."""
        return self.group.rank() * self.position_ids.shape[1] // self.size

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RowCut":
        """Return the same with `change` applied to its tensors."""
        return replace(
            self, position_ids=change(self.position_ids), positions=change(self.positions)
        )

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of the group's values. Collective. Each process must use it alike, for its
        equal share of a loss (`share`)."""
        total: torch.Tensor = _Summed.apply(values, self)  # type: ignore[no-untyped-call]
        return total


def share(total: torch.Tensor, cut: RowCut | None) -> torch.Tensor:
    """Return a process's share of a number that all processes of a row compute."""
    return total if cut is None else total / cut.size


class _Summed(torch.autograd.Function):
    """Backward adds the equal gradients of all processes' shares."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, cut: RowCut) -> torch.Tensor:
        ctx.size, total = cut.size, values.clone()
        dist.all_reduce(total, group=cut.group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.size, None


Attend = Callable[..., tuple[torch.Tensor, None]]
Ranges = Sequence[tuple[int, int]]
"""The heads (start, stop) of each process."""
Exchange = Callable[[torch.Tensor, Ranges, dist.ProcessGroup], torch.Tensor]


def over_whole_rows(attend: Attend) -> Attend:
    """Let an attention function, in the form of Transformers', take slices of rows with their
    `row_cut`; without one it is called as it is."""

    @functools.wraps(attend)
    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        row_cut: RowCut | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        if row_cut is None:
            return attend(module, query, key, value, attention_mask, **options)
        heads = Heads(row_cut, queries=query.shape[1], keys=key.shape[1])
        if options.get("s_aux") is not None:
            start, stop = heads.own
            options["s_aux"] = options["s_aux"][start:stop]
        query, key, value = heads.query(query), heads.key(key), heads.key(value)
        output, _ = attend(module, query, key, value, attention_mask, **options)
        return heads.output(output), None

    return attention


class Heads:
    """The division of a layer's heads among the processes of a row."""

    def __init__(self, cut: RowCut, *, queries: int, keys: int) -> None:
        """queries, keys: numbers of heads; each of keys serves neighbouring ones of queries."""
        self._group, self._num_rows = cut.group, len(cut.position_ids)
        self._queries, served = head_ranges(queries, cut.size), queries // keys
        self._keys = [(start // served, -(-stop // served)) for start, stop in self._queries]
        rank = cut.group.rank()
        self.own = start, stop = self._queries[rank]
        edges = [start, *(served * n for n in range(self._keys[rank][0] + 1, self._keys[rank][1]))]
        counts = [end - begin for begin, end in zip(edges, [*edges[1:], stop], strict=True)]
        self._copies = [count // math.gcd(*counts) for count in counts]
        """Of each own head of keys, so that all serve equally many heads of queries."""

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Return the own heads of whole rows, of all heads (rows, heads, tokens, width) of a slice;
        rows may be flattened to one."""
        return self._by_heads(x, self._queries)

    def key(self, x: torch.Tensor) -> torch.Tensor:
        """Return the heads of keys or values that the own heads of queries need."""
        heads = self._by_heads(x, self._keys)
        if len({*self._copies}) == 1:
            return heads
        pairs = zip(heads.split(1, dim=1), self._copies, strict=True)
        return torch.cat([head.expand(-1, count, -1, -1) for head, count in pairs], dim=1)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs (rows, tokens, heads, width) of a slice, of the own heads of whole
        rows."""
        rows = x.reshape(self._num_rows, -1, *x.shape[2:])
        slices: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            rows, (by_tokens, by_heads), self._queries, self._group
        )
        return slices.reshape(len(x), -1, *slices.shape[2:])

    def _by_heads(self, x: torch.Tensor, ranges: Ranges) -> torch.Tensor:
        rows = x.transpose(1, 2).reshape(self._num_rows, -1, x.shape[1], x.shape[3])
        heads: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            rows, (by_heads, by_tokens), ranges, self._group
        )
        return heads.reshape(len(x), -1, *heads.shape[2:]).transpose(1, 2)


def head_ranges(heads: int, size: int) -> Ranges:
    """Return the heads of each of `size` processes, as equally many as possible."""
    assert size <= heads, f"{heads} heads are not enough for {size} processes"
    counts = [heads // size + (rank < heads % size) for rank in range(size)]
    stops = accumulate(counts)
    return [(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def by_heads(x: torch.Tensor, ranges: Ranges, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the own heads (rows, size * tokens, own heads, width) of whole rows, of all heads
    (rows, tokens, heads, width) of a slice. Collective."""
    rows, tokens, _, width = x.shape
    size, (start, stop) = group.size(), ranges[group.rank()]
    counts = [(last - first) * rows * tokens * width for first, last in ranges]
    sent = x.new_empty(sum(counts))
    for part, (first, last) in zip(sent.split(counts), ranges, strict=True):
        part.view(rows, tokens, last - first, width).copy_(x[:, :, first:last])
    own = (stop - start) * rows * tokens * width
    received = x.new_empty(size * own)
    dist.all_to_all_single(received, sent, [own] * size, counts, group=group)
    slices = received.view(size, rows, tokens, stop - start, width)
    return slices.transpose(0, 1).reshape(rows, size * tokens, stop - start, width)


def by_tokens(x: torch.Tensor, ranges: Ranges, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all heads (rows, tokens, heads, width) of a slice, of the own heads (rows, size *
    tokens, own heads, width) of whole rows. A head of several processes is summed. Collective."""
    rows, _, own, width = x.shape
    size = group.size()
    sent = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    tokens = sent.shape[2]
    counts = [(last - first) * rows * tokens * width for first, last in ranges]
    received = x.new_empty(sum(counts))
    own_count = own * rows * tokens * width
    dist.all_to_all_single(received, sent.view(-1), counts, [own_count] * size, group=group)
    parts = [part.view(rows, tokens, -1, width) for part in received.split(counts)]
    heads = ranges[-1][1]
    if sum(part.shape[2] for part in parts) == heads:
        return torch.cat(parts, dim=2)
    total = x.new_zeros(
        (rows, tokens, heads, width), dtype=torch.promote_types(x.dtype, torch.float32)
    )
    for part, (first, last) in zip(parts, ranges, strict=True):
        total[:, :, first:last] += part
    return total.to(x.dtype)


class _Exchange(torch.autograd.Function):
    """Backward is the other exchange."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        exchanges: tuple[Exchange, Exchange],
        ranges: Ranges,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        exchange, ctx.back = exchanges
        ctx.options = ranges, group
        return exchange(x, ranges, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grads[0], *ctx.options), None, None, None
