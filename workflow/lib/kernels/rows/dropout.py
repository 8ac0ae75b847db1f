"""Dropout whose masks are drawn again at each use and never stored.

A mask is a function of seed and step, row of the tokens, position in the row, linear and feature.
So backward and recomputation draw the mask of forward, and neither the number of processes nor the
size of a micro-batch changes it. The generator is Philox4x32 with 7 rounds, which has no state and
passes BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, sec. 4): a
row's 64 bits are its key, the counter is (group of 8 features, position, linear, 0), and each of
the four words gives two draws of 16 bits. Kept features are not scaled here."""

from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from workflow.lib.kernels.kernel_launch import WARPS, launch, power_of_two
from workflow.lib.kernels.op import Case, Op, drawn

DRAWS = 2**16  # values of a draw
WORD = 0xFFFFFFFF
ROUNDS = 7
CHUNK_ELEMENTS = 2**19  # without the kernel, drawn at once in about 16 bytes each
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
PROGRAM_GROUPS = 512  # of 8 features


class Part(NamedTuple):
    """Neighbouring tokens of a micro-batch."""

    start: int = 0
    tokens: int | None = None  # of the micro-batch; None: the part is all of it


class Draw(NamedTuple):
    """The parameters of the mask of a linear's input."""

    row_keys: torch.Tensor  # (rows,) int64 on the input's device
    linear: int  # number of the linear among those of the model
    threshold: int  # dropped draws of 65,536
    part: Part = Part()  # the input's tokens
    offset: int = 0  # position in its row of the first token of each

    def row_tokens(self, count: int) -> int:
        """Return the tokens of a row, for an input of `count` tokens. Asserts that rows are whole:
        a kernel would read past the keys."""
        total, rows = self.part.tokens or count, len(self.row_keys)
        assert total % rows == 0, f"{total} tokens are not {rows} rows of one length"
        assert self.part.start + count <= total, "the part ends after the micro-batch"
        return total // rows

    @property
    def scale(self) -> float:
        """The factor that keeps the expectation: 1 / (1 - p)."""
        return DRAWS / (DRAWS - self.threshold)


def _by_kernel(
    out: torch.Tensor, rows: torch.Tensor, draw: Draw, add: bool = False
) -> torch.Tensor:
    tokens, features = rows.shape
    groups = -(-features // 8)
    assert out.is_contiguous(), "the kernel knows no strides"
    size = min(PROGRAM_GROUPS, power_of_two(groups))
    launch(
        "elementwise.drop", (tokens, -(-groups // size)), out, rows.contiguous(), draw.row_keys,
        draw.row_tokens(tokens), draw.part.start, draw.offset, features, groups, draw.linear,
        draw.threshold, add=add, size=size, num_warps=WARPS,
    )  # fmt: skip
    if add or out is rows:
        increment_version((out,))
    return out


def _by_torch(out: torch.Tensor, rows: torch.Tensor, draw: Draw, add: bool = False) -> torch.Tensor:
    row_tokens = draw.row_tokens(len(rows))
    if out is not rows and not add:
        rows = out.copy_(rows)
    tokens = torch.arange(len(rows), device=rows.device) + draw.part.start
    count = max(1, CHUNK_ELEMENTS // rows.shape[1])
    for part, numbers in zip(rows.split(count), tokens.split(count), strict=True):
        part.masked_fill_(_drops(draw, numbers, row_tokens, rows.shape[1]), 0.0)
    return out.add_(rows) if add else rows


def _drops(draw: Draw, tokens: torch.Tensor, row_tokens: int, features: int) -> torch.Tensor:
    """Return which elements of tokens (n,) of the micro-batch are dropped, (n, features) bool."""
    positions = (tokens % row_tokens + draw.offset)[:, None]
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
    """Return four words for each counter of four words, all int64 and below 2^32. key: int64, all
    64 bits are used. Shapes are broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & WORD, (key >> 32) & WORD
    for _ in range(rounds):
        # Products of 64 bits wrap around; as unsigned numbers their bits are right.
        one, other = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((other >> 32) & WORD) ^ c1 ^ k0, other & WORD
        c2, c3 = ((one >> 32) & WORD) ^ c3 ^ k1, one & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return c0, c1, c2, c3


def _case(device: torch.device, dtype: torch.dtype) -> Case:
    keys = torch.tensor([3, 2**40], device=device)
    return *drawn(device, dtype, (6, 83), (6, 83)), Draw(keys, 7, 20_000, Part(1, 8), 5), True


drop = Op("dropout", reference=_by_torch, kernel=_by_kernel, case=_case, exact=True)
"""Fills `out` with rows (T, features) of the draw's part of the micro-batch, with dropped features
0, or adds them to it; returns it. `out` may be `rows`; with `add` the rows may be overwritten."""


def dropped(rows: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Return rows (T, features) of the draw's part of the micro-batch, with dropped features 0."""
    return drop(torch.empty_like(rows), rows, draw)


def drop_(rows: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Drop features of rows (T, features) in place."""
    return drop(rows, rows, draw)
