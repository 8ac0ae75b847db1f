"""State shared by a model's adapters in training (`AdapterState`), and dropout of their inputs.

The factor 1 / (1 - p) is part of an adapter's scale. Adapters do not change within a step, so
derived tensors are computed once: casts to the compute dtype, unless weights are regathered, and
the row norms of DoRA."""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from workflow.lib.kernels.rows.dropout import DRAWS, Draw, Part, dropped

Casts = dict[Hashable, torch.Tensor]


class AdapterState:
    """Shared state of the adapters of one model on one process."""

    def __init__(self) -> None:
        self.row_keys: torch.Tensor | None = None
        """(rows,) int64, of the current micro-batch."""
        self.offset = 0
        """Position in its row of the first token of each."""
        self.sharded = False
        """Whether weights are gathered for each use: casts of them would outlive them."""
        self._part = Part()
        self._casts: Casts | None = None
        self._norms: Casts | None = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within the block no adapter changes, so derived tensors are cached."""
        assert self._norms is None, "the adapters are already taken as unchanged"
        self._norms, self._casts = {}, None if self.sharded else {}
        try:
            yield
        finally:
            self._norms = self._casts = None

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """Within the block the cache begins empty, and is dropped at the end: a CUDA graph may read
        no memory but its own."""
        kept = self._casts, self._norms
        self._norms, self._casts = {}, None if self.sharded else {}
        try:
            yield
        finally:
            self._casts, self._norms = kept

    @contextmanager
    def rows_as(self, starts: torch.Tensor, *, tokens: int) -> Iterator[None]:
        """Within the block rows begin at places (n,) of `tokens` tokens, each with its own key."""
        row_keys = self.row_keys
        if row_keys is not None:
            row_tokens = tokens // len(row_keys)
            self.row_keys = row_keys[starts // row_tokens] + starts % row_tokens
        try:
            yield
        finally:
            self.row_keys = row_keys

    @contextmanager
    def part(self, start: int, tokens: int) -> Iterator[None]:
        """Within the block linears compute a part of a micro-batch of `tokens` tokens, which begins
        at token `start`."""
        self._part, whole = Part(start, tokens), self._part
        try:
            yield
        finally:
            self._part = whole

    def draw(self, linear: int, threshold: int) -> Draw:
        """Return the draw of a linear's mask for the tokens that are computed now."""
        assert self.row_keys is not None, (
            "a micro-batch without keys of its rows cannot be dropped from"
        )
        return Draw(self.row_keys, linear, threshold, self._part, self.offset)

    def casts(self) -> Casts | None:
        """Return the cached casts; None where casts are not cached."""
        return self._casts

    def norms(self, linear: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the cached row norms (out,) of a linear; `make` computes them at first use."""
        if self._norms is None:
            return make()
        if linear not in self._norms:
            self._norms[linear] = make()
        return self._norms[linear]


class AdapterDropout(nn.Module):
    """Replaces PEFT's dropout of one linear's adapter."""

    def __init__(self, p: float) -> None:
        """p: the probability, which is rounded to a multiple of 1 / 65,536."""
        super().__init__()
        self.p, self._threshold = p, min(round(p * DRAWS), DRAWS - 1)
        self._state, self._linear = AdapterState(), 0

    def share(self, state: AdapterState, *, linear: int) -> None:
        """Read the micro-batch's keys from `state`, as the linear of this number."""
        self._state, self._linear = state, linear

    def draw(self) -> Draw | None:
        """Return the draw of this pass's mask; None in evaluation, which drops nothing."""
        if not self.training or not self._threshold:
            return None
        return self._state.draw(self._linear, self._threshold)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (..., features) with features set to 0, and the others scaled."""
        draw = self.draw()
        if draw is None:
            return x
        y: torch.Tensor = _Dropped.apply(x, draw)  # type: ignore[no-untyped-call]
        return y


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        ctx.draw = draw  # type: ignore[attr-defined]
        return _scaled(x, draw)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scaled(grads[0], ctx.draw), None  # type: ignore[attr-defined]


def _scaled(x: torch.Tensor, draw: Draw) -> torch.Tensor:
    return dropped(x.reshape(-1, x.shape[-1]), draw).mul_(draw.scale).view(x.shape)


def row_keys(seed: int, *, step: int, rows: Iterable[int]) -> list[int]:
    """Return the keys of a step's rows; rows: their numbers in the tokens folder."""
    names = (f"dropout {seed} {step} {row}".encode() for row in rows)
    digests = (hashlib.sha256(name).digest()[:8] for name in names)
    return [int.from_bytes(digest, "little", signed=True) for digest in digests]
