"""The gated delta rule over rows of tokens and its gradients, by GPU kernels: the results of
`gated_delta_rule` for scaled queries, and queries and keys of their final length.

First all chunks are prepared at once. Then programs loop over the chunks of a head with its state
in registers, and last all chunks' outputs are computed at once. Backward recomputes u, w and the
states, and runs in the other direction. `triton_code.delta_rule` has the formulas. Nothing here
waits for the device."""

from typing import Any, NamedTuple

import torch

from workflow.lib.kernels.launch import launch
from workflow.lib.kernels.recurrences.chunks import CHUNK, padded, parts_of, spaced, strides_of

# Columns of keys, all held by a program that loops over chunks; fp32 matmuls of this many more take
# minutes to compile.
MOST_KEYS = {2: 256, 4: 128}


class Tile(NamedTuple):
    """The size of a kernel's program."""

    keys: int  # most columns of queries and keys at a time
    values: int  # most columns of values at a time
    warps: int
    stages: int = 1


TILES = {
    "prepare": Tile(64, 64, 4),
    "scan": Tile(MOST_KEYS[2], 32, 4, 2),
    "output": Tile(64, 128, 4, 2),
    "within_backward": Tile(64, 64, 4, 2),
    "scan_backward": Tile(MOST_KEYS[2], 32, 4, 2),
    "chunk_backward": Tile(64, 64, 4, 2),
    "system_backward": Tile(64, 64, 4),
}
"""For values of 16 bits, as tried on an H100 with Triton 3.6, whose programs read
wrong addresses with fewer columns, or with one stage in `scan_backward`."""
TILES_FP32 = {
    "prepare": Tile(32, 32, 4),
    "scan": Tile(MOST_KEYS[4], 16, 4),
    "output": Tile(32, 64, 4),
    "within_backward": Tile(32, 32, 4),
    "scan_backward": Tile(MOST_KEYS[4], 16, 4),
    "chunk_backward": Tile(32, 32, 4),
    "system_backward": Tile(32, 32, 4),
}


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return (rows, tokens, value heads, value width) in q's type; states begin at zero with each
    row. q, k: (rows, tokens, key heads, key width), q scaled, each serving neighbouring value
    heads. v: (rows, tokens, value heads, value width). g, logarithms of decays, and beta, learning
    rates: (rows, tokens, value heads). Tensors between kernels have v's type."""
    q, k, v, g, beta = spaced(q), spaced(k), spaced(v), g.contiguous(), beta.contiguous()
    rule = _Rule.of(k, v)
    u, w, _, sums = _prepared(rule, k, v, g, beta, keeps=False)
    states, new = _scanned(rule, k, u, w, sums)
    out = _like(v, dtype=q.dtype)
    columns = rule.columns("output")
    num_programs = rule.tiles * parts_of(rule.value_width, columns["values"])
    rule.launch("output", num_programs, out, q, k, states, new, sums, **strides_of(query=q, key=k))
    return out


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k, v, g and beta, contiguous, for that of the output."""
    grad, q, k, v = spaced(grad), spaced(q), spaced(k), spaced(v)
    g, beta = g.contiguous(), beta.contiguous()
    rule = _Rule.of(k, v)
    u, w, inverse, sums = _prepared(rule, k, v, g, beta, keeps=True)
    states, new = _scanned(rule, k, u, w, sums)
    of_states, of_new = _scanned_back(rule, grad, q, k, w, sums)

    of_q, of_k = (v.new_empty(*v.shape[:3], rule.key_width) for _ in range(2))  # of value heads
    num_parts = parts_of(rule.key_width, rule.columns("chunk_backward")["keys"])
    partial, of_right = sums.new_empty(rule.tiles, 2, num_parts, CHUNK), torch.empty_like(w)
    rule.launch(
        "chunk_backward", rule.tiles * num_parts, of_q, of_k, of_right, partial,
        grad, q, k, beta, new, of_new, states, of_states, inverse, sums,
        **strides_of(grad=grad, query=q, key=k),
    )  # fmt: skip
    del states, of_states, new
    of_v, of_g, of_beta = (_like(x) for x in (v, g, beta))
    rule.launch(
        "system_backward", rule.tiles, of_k, of_v, of_g, of_beta, of_right, partial,
        k, v, beta, u, w, of_new, inverse, sums, **strides_of(key=k, value=v), parts=num_parts,
    )  # fmt: skip
    return _summed(of_q, q), _summed(of_k, k), of_v, of_g, of_beta


class _Rule(NamedTuple):
    """The sizes of one call."""

    rows: int
    tokens: int
    groups: int  # key heads
    heads: int  # value heads
    key_width: int
    value_width: int
    dtype: torch.dtype  # of the values

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor) -> "_Rule":
        rows, tokens, groups, key_width = k.shape
        heads, value_width = v.shape[2:]
        return cls(rows, tokens, groups, heads, key_width, value_width, v.dtype)

    @property
    def chunks(self) -> int:
        """Of a row; the last may have fewer tokens."""
        return parts_of(self.tokens, CHUNK)

    @property
    def tiles(self) -> int:
        """Chunks of all value heads."""
        return self.rows * self.heads * self.chunks

    def tile(self, name: str) -> Tile:
        return (TILES_FP32 if self.dtype == torch.float32 else TILES)[name]

    def columns(self, name: str) -> dict[str, int]:
        """Return a kernel's columns of keys and of values at a time."""
        tile = self.tile(name)
        return {
            "keys": min(tile.keys, padded(self.key_width, self.dtype)),
            "values": min(tile.values, padded(self.value_width, self.dtype)),
        }

    def launch(
        self, name: str, num_programs: int, out: torch.Tensor, *given: torch.Tensor, **options: Any
    ) -> None:
        """Start a kernel that writes to `out` and the tensors after it: most multiply a chunk by
        keys x values twice."""
        tile = self.tile(name)
        launch(
            f"delta_rule.{name}", (num_programs,), out, *given, tokens=self.tokens,
            chunks=self.chunks, heads=self.heads, share=self.heads // self.groups,
            key_width=self.key_width, value_width=self.value_width, **self.columns(name),
            precision="ieee" if self.dtype == torch.float32 else "tf32", num_warps=tile.warps,
            num_stages=tile.stages, **options,
            flop=4.0 * self.tiles * CHUNK * self.key_width * self.value_width,
        )  # fmt: skip


def _prepared(
    rule: _Rule,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return u (tiles, 64, value width), w (tiles, 64, key width), T (tiles, 64, 64) fp32 (empty
    unless `keeps`), and the sums (tiles, 64) fp32."""
    u = v.new_empty(rule.tiles, CHUNK, rule.value_width)
    w = v.new_empty(rule.tiles, CHUNK, rule.key_width)
    sums = v.new_empty(rule.tiles, CHUNK, dtype=torch.float32)
    inverse = v.new_empty(rule.tiles if keeps else 0, CHUNK, CHUNK, dtype=torch.float32)
    rule.launch(
        "prepare", rule.tiles, u, w, inverse, sums, k, v, g, beta,
        **strides_of(key=k, value=v), keeps=keeps,
    )  # fmt: skip
    return u, w, inverse, sums


def _scanned(
    rule: _Rule, k: torch.Tensor, u: torch.Tensor, w: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states before chunks (tiles, key width, value width), and `new`, like u."""
    states, new = u.new_empty(rule.tiles, rule.key_width, rule.value_width), torch.empty_like(u)
    num_programs = (
        rule.rows * rule.heads * parts_of(rule.value_width, rule.columns("scan")["values"])
    )
    rule.launch("scan", num_programs, states, new, k, u, w, sums, **strides_of(key=k))
    return states, new


def _scanned_back(
    rule: _Rule,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the states after chunks, and of `new`."""
    of_new = w.new_empty(rule.tiles, CHUNK, rule.value_width)
    of_states = w.new_empty(rule.tiles, rule.key_width, rule.value_width)
    distances = strides_of(grad=grad, query=q, key=k)
    rule.launch("within_backward", rule.tiles, of_new, grad, q, k, sums, **distances)
    parts = parts_of(rule.value_width, rule.columns("scan_backward")["values"])
    rule.launch(
        "scan_backward", rule.rows * rule.heads * parts, of_states, of_new, grad, q, k, w, sums,
        **distances,
    )  # fmt: skip
    return of_states, of_new


def _like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous tensor of x's shape."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _summed(by_value_head: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the value heads of each head of x, in x's shape and type."""
    if by_value_head.shape == x.shape:
        return by_value_head.to(x.dtype)
    rows, tokens, groups, width = x.shape
    return by_value_head.view(rows, tokens, groups, -1, width).sum(dim=3).to(x.dtype)
