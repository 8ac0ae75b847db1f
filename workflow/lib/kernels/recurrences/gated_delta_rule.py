"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) over rows of tokens.

With the state S of a head (key width x value width), a token's decay exp(g), key k, value v and
learning rate b, and its query q:

    S <- exp(g) (S - b k (k^T S)) + b k v^T,   output S^T q

Within a chunk of tokens all corrections are one triangular system, so one matrix maps the state
before a chunk to the state after it: S' = M S + N. Only one matmul per chunk is sequential; all
others take all chunks at once.

On a GPU kernels first prepare all chunks at once. Then programs loop over the chunks of a head with
its state in registers, and last all chunks' outputs are computed at once. Backward recomputes u, w
and the states, and runs in the other direction. `triton_code.delta_rule` has the formulas. Nothing
here waits for the device."""

from collections.abc import Callable
from typing import Any

import torch

from workflow.lib.kernels.op import Case, Op, Variant, keeping
from workflow.lib.kernels.recurrences.chunks import (
    CHUNK,
    Sizes,
    Tile,
    chunked,
    decays,
    joined,
    like,
    spaced,
    strides_of,
)
from workflow.lib.kernels.rows import norm

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


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Return the rule's result for scaled queries, and keys of their final length. Tensors between
    kernels have v's type."""
    q, k, v, g, beta = spaced(q), spaced(k), spaced(v), g.contiguous(), beta.contiguous()
    rule = _rule(k, v)
    u, w, _, sums = _prepared(rule, k, v, g, beta, keeps=False)
    states, new = _scanned(rule, k, u, w, sums)
    out = like(v, dtype=q.dtype)
    num_programs = rule.tiles * rule.parts("output", "value_width")
    rule.launch("output", num_programs, out, q, k, states, new, sums, **strides_of(query=q, key=k))
    return out


def _backward(
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


CASE_TOKENS = 2 * CHUNK + 2
NORM_EPS = 1e-6  # of query and key, as in the published models' code


def by_kernels(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalize: bool,
) -> torch.Tensor:
    """Return the result of `gated_delta_rule`, by kernels."""
    others = value, g, beta
    if normalize:
        query_norms, key_norms = _unit_norms(query)
        return _forward(norm.forward(query, query_norms), norm.forward(key, key_norms), *others)
    return _forward(query * query.shape[-1] ** -0.5, key, *others)


def gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalize: bool,
) -> list[torch.Tensor]:
    """Return the gradients of the rule's inputs from its output's, by kernels."""
    others = value, g, beta
    if normalize:
        query_norms, key_norms = _unit_norms(query)
        taken = norm.forward(query, query_norms), norm.forward(key, key_norms)
        grad_query, grad_key, *grad_others = _backward(grad, *taken, *others)
        grad_query = norm.backward(grad_query, query, query_norms)
        return [grad_query, norm.backward(grad_key, key, key_norms), *grad_others]
    scale = query.shape[-1] ** -0.5
    grad_query, *grad_others = _backward(grad, query * scale, key, *others)
    return [grad_query * scale, *grad_others]


class _UnitNorm:
    """x * length / sqrt(sum(x^2) + eps): an RMS norm whose weights are all alike."""

    bias, offset, subtracts_mean = None, 0.0, False

    def __init__(self, x: torch.Tensor, length: float) -> None:
        width = x.shape[-1]
        self.weight = x.new_full((width,), length * width**-0.5, dtype=torch.float32)
        self.eps = NORM_EPS / width


def _unit_norms(x: torch.Tensor) -> tuple[_UnitNorm, _UnitNorm]:
    """Return the norms of queries like x, which are scaled too, and of keys."""
    return _UnitNorm(x, x.shape[-1] ** -0.5), _UnitNorm(x, 1.0)


def _direction(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32, of length one in its last dimension."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPS)


def by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    normalize: bool,
) -> torch.Tensor:
    """Return the result of `gated_delta_rule`, by torch's operations and with their memory."""
    tokens, groups = key.shape[1:3]
    value_groups = (groups, value.shape[2] // groups)
    q, k = (chunked(x, CHUNK, (groups, 1)) for x in (query, key))
    v, log_decay, rate = (chunked(x, CHUNK, value_groups) for x in (value, g, beta))
    q, k = (_direction(x) if normalize else x for x in (q, k))
    q = q * key.shape[-1] ** -0.5
    sums = log_decay.cumsum(dim=-1)
    between, since, until = decays(sums), sums.exp(), (sums[..., -1:] - sums).exp()
    system = (k @ k.mT) * between * rate[..., None]
    right_sides = torch.cat((v, k * since[..., None]), dim=-1) * rate[..., None]
    solved = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    new, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    left = k * until[..., None]
    kept = torch.diag_embed(since[..., -1:].expand(*since.shape[:-1], k.shape[-1]))
    states = states_before(kept - left.mT @ read, left.mT @ new)
    values = new - read @ states
    output = (q * since[..., None]) @ states + ((q @ k.mT) * between) @ values
    return joined(output, tokens, query.dtype)


def states_before(matrices: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return the state before each chunk, where each makes it matrix @ state + added. matrices:
    (chunks, ..., width, width); added: (chunks, ..., width, other width). The first state is
    zero."""
    apply: Callable[..., torch.Tensor] = _Chain.apply
    return apply(matrices, added)


class _Chain(torch.autograd.Function):
    """One matmul a chunk in each direction."""

    @staticmethod
    def forward(ctx: Any, matrices: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        by, more = matrices.flatten(1, -3), added.flatten(1, -3)
        states = torch.empty_like(more)
        states[0].zero_()
        for i in range(1, len(states)):
            torch.baddbmm(more[i - 1], by[i - 1], states[i - 1], out=states[i])
        ctx.save_for_backward(by, states)
        ctx.shapes = matrices.shape, added.shape
        return states.view(added.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        by, states = ctx.saved_tensors
        grad_states = grads[0].reshape(states.shape)
        after = torch.empty_like(states)  # the gradient of the state after each chunk
        after[-1].zero_()
        for i in range(len(states) - 1, 0, -1):
            torch.baddbmm(grad_states[i], by[i].mT, after[i], out=after[i - 1])
        matrices_shape, added_shape = ctx.shapes
        return (after @ states.mT).view(matrices_shape), after.view(added_shape)


def _case(
    device: torch.device, dtype: torch.dtype, key_width: int, value_width: int, share: int
) -> Case:
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, CASE_TOKENS, 1, key_width, generator=draw)
    value = torch.randn(1, CASE_TOKENS, share, value_width, generator=draw)
    decay, rate = torch.rand(2, 1, CASE_TOKENS, share, generator=draw)
    arguments = [x.to(device, dtype) for x in (query, key, value)]
    arguments += [-decay.to(device), rate.to(device, dtype)]
    return *(x.requires_grad_() for x in arguments), True


def _supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> bool:
    return key.shape[3] <= MOST_KEYS[value.dtype.itemsize]


def _variant(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> Variant:
    return value.dtype, key.shape[3], value.shape[3], value.shape[2] // key.shape[2]


gated_delta_rule = Op(
    "the gated delta rule",
    reference=keeping(5, by_torch),
    kernel=keeping(5, by_kernels, gradients),
    case=_case,
    variant=_variant,
    supports=_supports,
)
"""Returns (rows, tokens, value heads, value width) in the queries' type; states begin at zero with
each row. Queries are scaled by one over the root of their width. query, key: (rows, tokens, key
heads, key width), each serving neighbouring value heads. value: (rows, tokens, value heads, value
width). g (at most 0), beta: (rows, tokens, value heads). normalize: queries and keys to length
one."""
