"""Dropout of an adapter's input, whose masks are drawn again wherever they are needed and never
kept.

A mask is a function of seed and step, row of the tokens, position in the row, linear and feature.
So backward and recomputation draw what forward has drawn, and neither the number of processes nor
the size of a micro-batch changes it. The generator is Philox4x32 with 7 rounds, which has no state
and passes BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, sec. 4):
a row's 64 bits are its key, the counter is (group of 8 features, position, linear, 0), and each of
the four words gives two draws of 16 bits. What is kept is not scaled here: 1 / (1 - p) is a part of
the adapter's scale.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from workflow.lib.kernels import elementwise as kernels
from workflow.lib.model.layers.adapter_state import AdapterState

DRAWS = 2**16  # values of a draw
WORD = 0xFFFFFFFF
ROUNDS = 7
CHUNK_ELEMENTS = 2**19  # whose masks are drawn at once without the kernel, in about 16 bytes each
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


class Draw(NamedTuple):
    """What decides the mask of a linear's input."""

    row_keys: torch.Tensor
    """(rows,) int64 on the input's device, as `row_keys` returns them."""
    linear: int
    """Number of the linear among those of the model."""
    threshold: int
    """Of 65,536 draws as many are dropped."""

    @property
    def scale(self) -> float:
        """What keeps the expectation: 1 / (1 - p)."""
        return DRAWS / (DRAWS - self.threshold)


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


def dropped(rows: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Return rows (T, features), of all rows of the micro-batch, with some features 0."""
    _check_tokens(rows, draw)
    if kernels.usable(rows.device):
        return kernels.drop(torch.empty_like(rows), rows, *draw)
    return drop_(rows.clone(), draw)


def drop_(rows: torch.Tensor, draw: Draw) -> torch.Tensor:
    """The same in place."""
    _check_tokens(rows, draw)
    if kernels.usable(rows.device):
        return kernels.drop(rows, rows, *draw)
    tokens = torch.arange(len(rows), device=rows.device)
    count = max(1, CHUNK_ELEMENTS // rows.shape[1])
    for part, numbers in zip(rows.split(count), tokens.split(count), strict=True):
        part.masked_fill_(_drops(draw, numbers, rows.shape), 0.0)
    return rows


def add_dropped_(total: torch.Tensor, rows: torch.Tensor, draw: Draw) -> None:
    """Add to `total` what `dropped` would return; `rows` may be overwritten."""
    if kernels.usable(rows.device):
        kernels.drop(total, rows, *draw, add=True)
    else:
        total.add_(drop_(rows, draw))


def _check_tokens(rows: torch.Tensor, draw: Draw) -> None:
    """Where tokens are not of whole rows a kernel would read past the keys."""
    count = len(draw.row_keys)
    assert len(rows) % count == 0, f"{len(rows)} tokens are not {count} rows of one length"


def _drops(draw: Draw, tokens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return which elements of some tokens (n,) of rows of this shape (T, features) are dropped,
    (n, features) bool: what the kernel computes.
    """
    row_tokens, features = shape[0] // len(draw.row_keys), shape[1]
    positions = (tokens % row_tokens)[:, None]
    counter = (
        torch.arange(-(-features // 8), device=tokens.device)[None],
        positions,
        torch.full_like(positions, draw.linear),
        torch.zeros_like(positions),
    )
    halves = []
    for word in philox(draw.row_keys[tokens // row_tokens, None], counter):
        halves += [word & 0xFFFF, word >> 16]
    # Draw k of a group belongs to the k-th eighth of the features, so that neighbouring threads
    # of the kernel read neighbouring features.
    drops: torch.Tensor = torch.cat(halves, dim=1)[:, :features] < draw.threshold
    return drops


def philox(
    key: torch.Tensor, counter: tuple[torch.Tensor, ...], *, rounds: int = ROUNDS
) -> tuple[torch.Tensor, ...]:
    """Return four words for each counter of four words, all int64 and below 2^32.

    key: int64, of which all 64 bits count. Shapes are broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & WORD, (key >> 32) & WORD
    for _ in range(rounds):
        # Products of 64 bits wrap around; their bits are those without a sign.
        one, other = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((other >> 32) & WORD) ^ c1 ^ k0, other & WORD
        c2, c3 = ((one >> 32) & WORD) ^ c3 ^ k1, one & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3
