"""Dropout of an adapter's input; its scale 1 / (1 - p) is a part of the adapter's."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from workflow.lib.kernels.rows.dropout import DRAWS, Draw, dropped
from workflow.lib.model.layers.adapter_state import AdapterState


class AdapterDropout(nn.Module):
    """Takes the place of PEFT's dropout of one linear's adapter."""

    def __init__(self, p: float) -> None:
        """p: the probability, which is rounded to a multiple of 1 / 65,536."""
        super().__init__()
        self.p, self._threshold = p, min(round(p * DRAWS), DRAWS - 1)
        self._state, self._linear = AdapterState(), 0

    def share(self, state: AdapterState, *, linear: int) -> None:
        """Read the micro-batch's keys from `state`, as the linear of this number."""
        self._state, self._linear = state, linear

    def draw(self) -> Draw | None:
        """Return what decides the mask of this pass; None in evaluation, which drops nothing."""
        if not self.training or not self._threshold:
            return None
        row_keys = self._state.row_keys
        assert row_keys is not None, "a micro-batch without keys of its rows cannot be dropped from"
        return Draw(row_keys, self._linear, self._threshold)

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
    """Return the keys of a step's rows, which are named by their numbers in the tokens folder."""
    names = (f"dropout {seed} {step} {row}".encode() for row in rows)
    digests = (hashlib.sha256(name).digest()[:8] for name in names)
    return [int.from_bytes(digest, "little", signed=True) for digest in digests]
