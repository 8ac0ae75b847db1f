"""Attention's results that recomputed layers keep from forward to backward.

Attention takes a time that grows with the lengths of documents, and its results (tokens, hidden)
few bytes: of a long row they are the cheapest to keep, in host memory if activations are there."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


class KeptResults:
    """Collects what attention returns in a layer's forward, and returns it when the layer is
    computed again."""

    def __init__(self) -> None:
        self.pack: Callable[[torch.Tensor], Any] | None = None
        self.unpack: Callable[[Any], torch.Tensor] | None = None
        """Hooks of saved tensors; None: tensors stay where they are."""
        self._collected: list[list[Any]] | None = None
        self._returned: Iterator[list[Any]] | None = None

    def of(self, compute: Callable[..., Tensors], *heads: torch.Tensor) -> Tensors:
        """Return the results of heads: kept ones in a layer that is computed again."""
        if self._returned is not None:
            results = next(self._returned)
            return tuple(map(self.unpack, results) if self.unpack else results)
        made = compute(*heads)
        if self._collected is not None:
            self._collected.append([*(map(self.pack, made) if self.pack else made)])
        return made

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a layer's forward and of its recomputation, for torch's
        `checkpoint`."""
        results: list[list[Any]] = []
        return _Pass(self, "_collected", lambda: results), _Pass(
            self, "_returned", lambda: iter(results)
        )


class _Pass(AbstractContextManager[None]):
    """Sets a field of kept results within the block."""

    def __init__(self, kept: KeptResults, field: str, value: Callable[[], Any]) -> None:
        self._kept, self._field, self._value = kept, field, value

    def __enter__(self) -> None:
        setattr(self._kept, self._field, self._value())

    def __exit__(self, *_: object) -> None:
        setattr(self._kept, self._field, None)
