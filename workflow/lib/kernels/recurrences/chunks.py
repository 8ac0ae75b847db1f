"""Rows of tokens as chunks, in float32, the decay between tokens of a chunk, and what all kernels
of recurrences are started with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from workflow.lib.kernels.kernel_launch import launch, power_of_two


def chunked(x: torch.Tensor, chunk: int, heads: tuple[int, int]) -> torch.Tensor:
    """Return (rows, tokens, heads, ...) as (chunks, rows, *heads, chunk, ...) in float32, with
    zeros after the last token. heads: groups, and heads of each."""
    rows, tokens, _, *trailing = x.shape
    count = -(-tokens // chunk)
    padding = (0, 0) * (1 + len(trailing)) + (0, count * chunk - tokens)
    apart = nn.functional.pad(x, padding).view(rows, count, chunk, *heads, *trailing)
    order = (1, 0, 3, 4, 2, *range(5, apart.dim()))
    return _copied(apart.permute(order), torch.float32)


def joined(x: torch.Tensor, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (chunks, rows, groups, heads, chunk, width) as (rows, tokens, heads, width)."""
    count, rows, groups, heads, chunk, width = x.shape
    together = _copied(x.permute(1, 0, 4, 2, 3, 5), dtype)
    return together.view(rows, count * chunk, groups * heads, width)[:, :tokens]


def _copied(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def decays(cumulated: torch.Tensor) -> torch.Tensor:
    """Return each token's decay until each later one of its chunk, and 0 at earlier ones.
    cumulated: sums of the logarithms of decays from the chunk's beginning, (..., chunk). The result
    is (..., chunk, chunk): rows are the later tokens."""
    between = cumulated[..., :, None] - cumulated[..., None, :]
    chunk = cumulated.shape[-1]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=cumulated.device).triu(1)
    return between.masked_fill(later, float("-inf")).exp()


class Tile(NamedTuple):
    """The size of a kernel's program."""

    columns: tuple[int, int]  # most columns at a time along both sides of a state
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call of the kernels of a module of `triton_code`."""

    module: str
    programs: Mapping[str, Tile]  # by kernel
    widths: Mapping[str, int]  # of the sides of a head's state, as kernels name them
    columns_named: tuple[str, str]  # the kernels' names of a program's columns along them
    rows: int
    tokens: int
    groups: int  # of heads that share their keys, or B and C
    heads: int
    dtype: torch.dtype  # of the inputs

    @property
    def chunks(self) -> int:
        """Of a row; the last may have fewer tokens."""
        return parts_of(self.tokens, CHUNK)

    @property
    def tiles(self) -> int:
        """Chunks of all heads."""
        return self.rows * self.heads * self.chunks

    @property
    def share(self) -> int:
        """Heads of a group."""
        return self.heads // self.groups

    def _columns(self, name: str) -> list[int]:
        """Return a kernel's columns at a time along both sides."""
        sizes = zip(self.programs[name].columns, self.widths.values(), strict=True)
        return [min(most, padded(width, self.dtype)) for most, width in sizes]

    def parts(self, name: str, side: str) -> int:
        """Return how many programs of a kernel share a side, by the name of its width."""
        columns = dict(zip(self.widths, self._columns(name), strict=True))
        return parts_of(self.widths[side], columns[side])

    def launch(
        self,
        name: str,
        num_programs: int,
        out: torch.Tensor,
        *arguments: torch.Tensor,
        **options: Any,
    ) -> None:
        """Start a kernel that writes to `out` and perhaps tensors after it: most multiply a chunk
        by states twice."""
        one, other = self.widths.values()
        columns = dict(zip(self.columns_named, self._columns(name), strict=True))
        tile = self.programs[name]
        launch(
            f"{self.module}.{name}", (num_programs,), out, *arguments, tokens=self.tokens,
            chunks=self.chunks, heads=self.heads, share=self.share, **self.widths, **columns,
            precision="ieee" if self.dtype == torch.float32 else "tf32", num_warps=tile.warps,
            num_stages=tile.stages, **options, flop=4.0 * self.tiles * CHUNK * one * other,
        )  # fmt: skip


CHUNK = 64  # tokens, as in `triton_code.chunks`
LEAST_COLUMNS = {
    2: 64,
    4: 16,
}  # of a program, by a value's bytes; see `gated_delta_rule.TILES`


def spaced(x: torch.Tensor) -> torch.Tensor:
    """Return x (rows, tokens, heads, width) with equal distances and contiguous heads."""
    rows, tokens = x.shape[:2]
    row_stride, token_stride, _, column_stride = x.stride()
    alike = rows == 1 or row_stride == tokens * token_stride
    return x if alike and column_stride == 1 else x.contiguous()


def strides_of(**tensors: torch.Tensor) -> dict[str, int]:
    """Return the strides of tokens and of heads under their names in kernels."""
    return {
        f"{name}_{of}": x.stride(dim)
        for name, x in tensors.items()
        for dim, of in ((1, "token"), (2, "head"))
    }


def like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous tensor of x's shape."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def parts_of(whole: int, size: int) -> int:
    return -(-whole // size)


def padded(width: int, dtype: torch.dtype) -> int:
    """Return a program's columns for this width."""
    return max(LEAST_COLUMNS[dtype.itemsize], power_of_two(width))
