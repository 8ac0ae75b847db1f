# mypy: ignore-errors
"""Shared code of recurrences' GPU kernels, in Triton: the place of a program's chunk, the sums of
its log decays, matmuls, and states. Each kernel reads rows by its own code: compilers make other
programs of other forms, and those that were tried on a GPU stay as they are."""

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)


@triton.jit
def chunk_place(number, tokens, chunks, heads):
    """Return the program's first token, the remaining tokens of its row, its head and its tile."""
    chunk, row = number // heads % chunks, (number // heads // chunks).to(tl.int64)
    head = number % heads
    tile = (row * heads + head) * chunks + chunk
    return row * tokens + chunk * CHUNK, tokens - chunk * CHUNK, head, tile


@triton.jit
def load_sums(sums, tile):
    """Return the sums of log decays of a tile, and the last token's."""
    token = tl.arange(0, CHUNK)
    return tl.load(sums + tile * CHUNK + token), tl.load(sums + tile * CHUNK + CHUNK - 1)


@triton.jit
def dot(a, b, kind: tl.constexpr, precision: tl.constexpr):
    """Return a b of operands in type `kind`, in fp32."""
    return tl.dot(a.to(kind), b.to(kind), input_precision=precision)


@triton.jit
def decays(total):
    """Return D: each token's decay until each later one of its chunk, 0 at earlier ones."""
    token = tl.arange(0, CHUNK)
    between = total[:, None] - total[None, :]
    return tl.exp(tl.where(token[:, None] >= token[None, :], between, float("-inf")))


@triton.jit
def store_rows(x, value, at, stride, left, start, width, size: tl.constexpr):
    """Write 64 rows from offset `at`, or the `left` ones, in `size` columns from `start`."""
    offsets, inside = rows_places(stride, left, start, width, size)
    tl.store(x + at + offsets, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def rows_places(stride, left, start, width, size: tl.constexpr):
    """Return where such rows lie from `at`, within int32, and which of them there are."""
    row, column = tl.arange(0, CHUNK), start + tl.arange(0, size)
    offsets = row[:, None] * stride + column[None, :]
    return offsets, (row < left)[:, None] & (column < width)[None, :]


@triton.jit
def load_state(
    x, tile, row_start, start, height: tl.constexpr, width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Return `rows` rows and `columns` columns of a tile's state (height, width)."""
    offsets, inside = state_places(row_start, start, height, width, rows, columns)
    return tl.load(x + tile * height * width + offsets, mask=inside, other=0.0)


@triton.jit
def state_places(
    row_start, start, height: tl.constexpr, width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Return where they lie in the tile, within int32, and which of them there are."""
    row, column = row_start + tl.arange(0, rows), start + tl.arange(0, columns)
    offsets = row[:, None] * width + column[None, :]
    return offsets, (row < height)[:, None] & (column < width)[None, :]
