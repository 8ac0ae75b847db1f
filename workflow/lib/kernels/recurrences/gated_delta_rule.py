"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) over rows of tokens.

With the state S of a head (key width x value width), a token's decay exp(g), key k, value v and
learning rate b, and its query q:

    S <- exp(g) (S - b k (k^T S)) + b k v^T,   output S^T q

Within a chunk of tokens all corrections are one triangular system, so one matrix maps the state
before a chunk to the state after it: S' = M S + N. Only one matmul per chunk is sequential; all
others take all chunks at once. On a GPU kernels do so (`delta_kernels`)."""

from collections.abc import Callable
from typing import Any

import torch

from workflow.lib.kernels.op import Case, Op, Variant, keeping
from workflow.lib.kernels.recurrences import delta_kernels
from workflow.lib.kernels.recurrences.chunks import chunked, decays, joined
from workflow.lib.kernels.rows import norm

CHUNK = 64
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
        return delta_kernels.forward(
            norm.forward(query, query_norms), norm.forward(key, key_norms), *others
        )
    return delta_kernels.forward(query * query.shape[-1] ** -0.5, key, *others)


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
        grad_query, grad_key, *grad_others = delta_kernels.backward(grad, *taken, *others)
        grad_query = norm.backward(grad_query, query, query_norms)
        return [grad_query, norm.backward(grad_key, key, key_norms), *grad_others]
    scale = query.shape[-1] ** -0.5
    grad_query, *grad_others = delta_kernels.backward(grad, query * scale, key, *others)
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
    return key.shape[3] <= delta_kernels.MOST_KEYS[value.dtype.itemsize]


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
