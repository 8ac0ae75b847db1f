"""The gated delta rule over rows of tokens and its gradients, by GPU kernels: the results of
`gated_delta_rule` for scaled queries, and queries and keys of their final length.

First all chunks are prepared at once. Then programs loop over the chunks of a head with its state
in registers, and last all chunks' outputs are computed at once. Backward recomputes u, w and the
states, and runs in the other direction. `triton_code.delta_rule` has the formulas. Nothing here
waits for the device."""

import torch

from workflow.lib.kernels.recurrences.chunks import CHUNK, Sizes, Tile, like, spaced, strides_of

# Columns of keys, all held by a program that loops over chunks; fp32 matmuls of this many more take
# minutes to compile.
MOST_KEYS = {2: 256, 4: 128}


TILES = {
    "prepare": Tile((64, 64), 4),
    "scan": Tile((MOST_KEYS[2], 32), 4, 2),
    "output": Tile((64, 128), 4, 2),
    "within_backward": Tile((64, 64), 4, 2),
    "scan_backward": Tile((MOST_KEYS[2], 32), 4, 2),
    "chunk_backward": Tile((64, 64), 4, 2),
    "system_backward": Tile((64, 64), 4),
}
"""For values of 16 bits, as tried on an H100 with Triton 3.6, whose programs read
wrong addresses with fewer columns, or with one stage in `scan_backward`."""
TILES_FP32 = {
    "prepare": Tile((32, 32), 4),
    "scan": Tile((MOST_KEYS[4], 16), 4),
    "output": Tile((32, 64), 4),
    "within_backward": Tile((32, 32), 4),
    "scan_backward": Tile((MOST_KEYS[4], 16), 4),
    "chunk_backward": Tile((32, 32), 4),
    "system_backward": Tile((32, 32), 4),
}


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return (rows, tokens, value heads, value width) in q's type; states begin at zero with each
    row. q, k: (rows, tokens, key heads, key width), q scaled, each serving neighbouring value
    heads. v: (rows, tokens, value heads, value width). g, logarithms of decays, and beta, learning
    rates: (rows, tokens, value heads). Tensors between kernels have v's type."""
    q, k, v, g, beta = spaced(q), spaced(k), spaced(v), g.contiguous(), beta.contiguous()
    rule = _rule(k, v)
    u, w, _, sums = _prepared(rule, k, v, g, beta, keeps=False)
    states, new = _scanned(rule, k, u, w, sums)
    out = like(v, dtype=q.dtype)
    num_programs = rule.tiles * rule.parts("output", "value_width")
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
    """Return the gradients of q, k, v, g and beta, contiguous, from the output's."""
    grad, q, k, v = spaced(grad), spaced(q), spaced(k), spaced(v)
    g, beta = g.contiguous(), beta.contiguous()
    rule = _rule(k, v)
    u, w, inverse, sums = _prepared(rule, k, v, g, beta, keeps=True)
    states, new = _scanned(rule, k, u, w, sums)
    grad_states, grad_new = _scanned_back(rule, grad, q, k, w, sums)

    grad_q, grad_k = (v.new_empty(*v.shape[:3], k.shape[3]) for _ in range(2))  # of value heads
    num_parts = rule.parts("chunk_backward", "key_width")
    partial, grad_right = sums.new_empty(rule.tiles, 2, num_parts, CHUNK), torch.empty_like(w)
    rule.launch(
        "chunk_backward", rule.tiles * num_parts, grad_q, grad_k, grad_right, partial,
        grad, q, k, beta, new, grad_new, states, grad_states, inverse, sums,
        **strides_of(grad=grad, query=q, key=k),
    )  # fmt: skip
    del states, grad_states, new
    grad_v, grad_g, grad_beta = (like(x) for x in (v, g, beta))
    rule.launch(
        "system_backward", rule.tiles, grad_k, grad_v, grad_g, grad_beta, grad_right, partial,
        k, v, beta, u, w, grad_new, inverse, sums, **strides_of(key=k, value=v), parts=num_parts,
    )  # fmt: skip
    return _summed(grad_q, q), _summed(grad_k, k), grad_v, grad_g, grad_beta


def _rule(k: torch.Tensor, v: torch.Tensor) -> Sizes:
    rows, tokens, groups, key_width = k.shape
    heads, value_width = v.shape[2:]
    programs = TILES_FP32 if v.dtype == torch.float32 else TILES
    widths = {"key_width": key_width, "value_width": value_width}
    named = ("keys", "values")
    return Sizes("delta_rule", programs, widths, named, rows, tokens, groups, heads, v.dtype)


def _prepared(
    rule: Sizes,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return u (tiles, 64, value width), w (tiles, 64, key width), T (tiles, 64, 64) fp32 (empty
    unless `keeps`), and the sums (tiles, 64) fp32."""
    u = v.new_empty(rule.tiles, CHUNK, v.shape[3])
    w = v.new_empty(rule.tiles, CHUNK, k.shape[3])
    sums = v.new_empty(rule.tiles, CHUNK, dtype=torch.float32)
    inverse = v.new_empty(rule.tiles if keeps else 0, CHUNK, CHUNK, dtype=torch.float32)
    rule.launch(
        "prepare", rule.tiles, u, w, inverse, sums, k, v, g, beta,
        **strides_of(key=k, value=v), keeps=keeps,
    )  # fmt: skip
    return u, w, inverse, sums


def _scanned(
    rule: Sizes, k: torch.Tensor, u: torch.Tensor, w: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states before chunks (tiles, key width, value width), and `new`, like u."""
    states, new = u.new_empty(rule.tiles, k.shape[3], u.shape[2]), torch.empty_like(u)
    num_programs = rule.rows * rule.heads * rule.parts("scan", "value_width")
    rule.launch("scan", num_programs, states, new, k, u, w, sums, **strides_of(key=k))
    return states, new


def _scanned_back(
    rule: Sizes,
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the states after chunks, and of `new`."""
    grad_new = w.new_empty(rule.tiles, CHUNK, grad.shape[3])
    grad_states = w.new_empty(rule.tiles, k.shape[3], grad.shape[3])
    distances = strides_of(grad=grad, query=q, key=k)
    rule.launch("within_backward", rule.tiles, grad_new, grad, q, k, sums, **distances)
    num_programs = rule.rows * rule.heads * rule.parts("scan_backward", "value_width")
    rule.launch(
        "scan_backward", num_programs, grad_states, grad_new, grad, q, k, w, sums,
        **distances,
    )  # fmt: skip
    return grad_states, grad_new


def _summed(by_value_head: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the value heads of each head of x, in x's shape and type."""
    if by_value_head.shape == x.shape:
        return by_value_head.to(x.dtype)
    rows, tokens, groups, width = x.shape
    return by_value_head.view(rows, tokens, groups, -1, width).sum(dim=3).to(x.dtype)
