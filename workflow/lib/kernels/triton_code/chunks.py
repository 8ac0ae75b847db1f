# mypy: ignore-errors
"""Shared code of recurrences' GPU kernels, in Triton: the place of a program's chunk, the sums of
its log decays, and matmuls. Each kernel reads rows by its own code: compilers make other programs
of other forms, and those that were tried on a GPU stay as they are."""

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
