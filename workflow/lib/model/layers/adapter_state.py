"""What all adapters of a model share while it is trained: the micro-batch's keys, and what is
computed once from adapters that do not change.

Within a step adapters do not change. What is made of them then is made at its first use: the casts
to the compute dtype, where no gathered weights come and go, and the row norms of DoRA."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

Casts = dict[Hashable, torch.Tensor]


class AdapterState:
    """Of one model on one process."""

    def __init__(self) -> None:
        self.row_keys: torch.Tensor | None = None
        """(rows,) int64, of the micro-batch that is computed (`adapter_dropout`)."""
        self.sharded = False
        """Whether weights are gathered for each use: casts of them would outlive them."""
        self._casts: Casts | None = None
        self._norms: Casts | None = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within the block nobody changes an adapter, so what is made of adapters is kept."""
        assert self._norms is None, "the adapters are already taken as unchanged"
        self._norms, self._casts = {}, None if self.sharded else {}
        try:
            yield
        finally:
            self._norms = self._casts = None

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """Within the block nothing is taken that was kept before, and what is kept there goes with
        it: a CUDA graph may read no memory but its own."""
        kept = self._casts, self._norms
        self._norms, self._casts = {}, None if self.sharded else {}
        try:
            yield
        finally:
            self._casts, self._norms = kept

    @contextmanager
    def rows_as(self, places: torch.Tensor, *, tokens: int) -> Iterator[None]:
        """Within the block rows begin at places (n,) of `tokens` tokens, each with its own key."""
        row_keys = self.row_keys
        if row_keys is not None:
            row_tokens = tokens // len(row_keys)
            self.row_keys = row_keys[places // row_tokens] + places % row_tokens
        try:
            yield
        finally:
            self.row_keys = row_keys

    def casts(self) -> Casts | None:
        """Return the casts that are kept; None where none are."""
        return self._casts

    def norms(self, linear: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the row norms (out,) of a linear, made by `make` unless they are kept."""
        if self._norms is None:
            return make()
        if linear not in self._norms:
            self._norms[linear] = make()
        return self._norms[linear]
