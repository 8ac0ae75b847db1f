"""What the kernels of experts must compute, on any device, followed by what the CPU's loop over
experts computes of the same values in fp32."""

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.support.stacks import packed_stack
from workflow.lib.kernels.eight_bits.matmul import FLOAT8, StoredStack, decode_columns, decode_rows
from workflow.lib.kernels.experts.gates import gated, gated_backward_
from workflow.lib.kernels.experts.grouped_matmul import (
    Routing,
    Rows,
    Update,
    Weights,
    bias_products,
    route,
    row_tiles,
    rows_matmul,
    transposed,
    weights_matmul,
)
from workflow.lib.kernels.rows.gating import ACTIVATIONS
from workflow.lib.model.experts.expert_matmul import column_weights, operand, row_weights
from workflow.lib.model.experts.fused_experts import Gate

EXPERTS, TOP_K = 6, 2
Function = Callable[[torch.Tensor], torch.Tensor]
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]


def routings(num_tokens: int, *, device: str) -> tuple[Routing, Routing]:
    """Return the routing of tokens for the kernels and for the CPU. Expert 2 gets no row, and
    expert 4 half of them."""
    draw = torch.Generator().manual_seed(0)
    others = torch.tensor([0, 1, 3, 5])[torch.randint(0, 4, (num_tokens,), generator=draw)]
    index = torch.stack((others, torch.full_like(others, 4)), dim=1)
    plain = route(index, num_experts=EXPERTS)._replace(tiles=None)
    there = Routing(*(x.to(device) for x in plain[:3]), None, TOP_K)
    tiles = row_tiles(there.ends, num_rows=len(there.order))
    return there._replace(tiles=tiles), plain


def matmuls(
    *, width: int, columns: int, rank: int, num_tokens: int, dtype: torch.dtype, device: str
) -> Pairs:
    """Yield matmuls of rows and of tokens' rows, alone, with update and bias, and written into some
    columns; with weights that lie along the sum, and across it."""
    draw = torch.Generator().manual_seed(1)
    for by_token in (False, True):
        here, plain = routings(num_tokens, device=device)
        num_rows = num_tokens * (1 if by_token else TOP_K)
        rows = torch.randn(num_rows, width, generator=draw).to(dtype)
        weights = (torch.randn(EXPERTS, columns, width, generator=draw) / width**0.5).to(dtype)
        low = torch.randn(num_tokens * TOP_K, rank, generator=draw).to(dtype)
        small = torch.randn(EXPERTS, columns, rank, generator=draw).to(dtype)
        bias = torch.randn(EXPERTS, columns, generator=draw).to(dtype)
        update = Update(low.float(), small.float(), 0.75)
        one = Rows(rows.float(), by_token)
        other = Rows(rows.to(device), by_token)
        across = weights.transpose(1, 2).contiguous().to(device).transpose(1, 2)
        for there in (weights.to(device), across):
            alone = rows_matmul(one, Weights(weights.float()), plain)
            yield rows_matmul(other, Weights(there), here), alone
            with_all = rows_matmul(
                one, Weights(weights.float()), plain, update=update, bias=bias.float()
            )
            moved = Update(low.to(device), small.to(device), 0.75)
            part = torch.zeros(num_tokens * TOP_K, columns + 16, dtype=dtype, device=device)
            given = {"update": moved, "bias": bias.to(device), "out": part[:, 8 : columns + 8]}
            yield rows_matmul(other, Weights(there), here, **given), with_all
            assert not part[:, :8].any()
            assert not part[:, columns + 8 :].any()
        wide = bias_products(other, weights[:, 0].contiguous().to(device), here)
        yield wide, bias_products(one, weights[:, 0].float(), plain)


def sums(*, columns: int, rank: int, num_tokens: int, dtype: torch.dtype, device: str) -> Pairs:
    """Yield gradients of an adapter's A and B as the masters lie; `rank` is filled up by 2."""
    draw = torch.Generator().manual_seed(2)
    for by_token in (False, True):
        here, plain = routings(num_tokens, device=device)
        left = torch.randn(num_tokens * TOP_K, rank + 2, generator=draw).to(dtype)
        num_rows = num_tokens * (1 if by_token else TOP_K)
        right = torch.randn(num_rows, columns, generator=draw).to(dtype)
        empty, own = torch.empty(EXPERTS, rank, columns), Rows(right.float(), by_token)
        expected = weights_matmul(empty, left.float(), own, plain, 0.5)
        moved = (left.to(device), Rows(right.to(device), by_token), here)
        as_a = torch.full((EXPERTS, rank, columns), 9.0, device=device)
        yield weights_matmul(as_a, *moved, 0.5), expected
        as_b = torch.full((columns, rank, EXPERTS), 9.0, device=device).permute(2, 1, 0)
        yield weights_matmul(as_b, *moved, 0.5), expected


def transpositions(*, dtype: torch.dtype, device: str) -> Pairs:
    """Yield transposed matrices, of several squares and of parts, in a type."""
    draw = torch.Generator().manual_seed(3)
    for shape in ((130, 3), (64, 128), (130, 200)):
        x = torch.randn(shape, generator=draw)
        out = torch.empty(shape[::-1], dtype=dtype, device=device)
        yield transposed.kernel(out, x.to(device)), x.t().to(dtype).float()


class Clamped:
    """A module of experts with the gate of gpt-oss, as Transformers has it, and its constants."""

    alpha, limit = 1.702, 3.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def side_by_side(up: torch.Tensor, *, activation: Function) -> torch.Tensor:
    gate, other = up.chunk(2, dim=-1)
    return activation(gate) * other


def gates(*, width: int, num_tokens: int, dtype: torch.dtype, device: str) -> Pairs:
    draw = torch.Generator().manual_seed(3)
    here, plain = routings(num_tokens, device=device)
    num_rows = num_tokens * TOP_K
    known = {name: partial(side_by_side, activation=act) for name, (act, _) in ACTIVATIONS.items()}
    for name, function in (known | {"clamped": Clamped()._apply_gate}).items():
        up = (2 * torch.randn(num_rows, 2 * width, generator=draw)).to(dtype)
        grad = torch.randn(num_rows, width, generator=draw).to(dtype)
        weights = torch.rand(num_tokens, TOP_K, generator=draw).to(dtype)
        gate = Gate(function)
        assert gate.form.kind == name
        exact = gate.gradients(up.float().clone(), grad.float().clone(), weights.float(), plain)
        yield gated.kernel(up.to(device), gate.form), exact[0]
        there = (grad.to(device), up.to(device))
        made = gated_backward_.kernel(*there, weights.to(device), here.order, gate.form)
        yield from zip(made, exact, strict=True)


def float8_matmuls(
    *, width: int, columns: int, num_tokens: int, device: str, interpreted: bool
) -> Pairs:
    """Yield slices of an NF4 stack that kernels decode to float8, rows and columns, and matmuls
    with them.

    interpreted: Triton's interpreter cuts float8 off where a GPU rounds, so there the kernels write
    what is still to be rounded."""
    draw = torch.Generator().manual_seed(4)
    plain_stack = packed_stack(torch.randn(EXPERTS, columns, width, generator=draw))
    stack = copy.deepcopy(plain_stack).to(device)
    packed = StoredStack(stack.stored(), EXPERTS, columns, width)
    low = torch.randn(num_tokens * TOP_K, 16, generator=draw)
    ways = (
        (row_weights, decode_rows, width, columns - 64),
        (column_weights, decode_columns, columns, width - 64),
    )
    for by_token, (make, decode, size, stop) in itertools.product((False, True), ways):
        here, plain = routings(num_tokens, device=device)
        num_rows = num_tokens * (1 if by_token else TOP_K)
        rows = torch.randn(num_rows, size, generator=draw)
        expected = make(plain_stack, 64, stop, float8=True, dtype=torch.float32)
        scales = expected.scales.to(device)
        kind = torch.float32 if interpreted else FLOAT8
        values = decode.kernel(packed, scales, 64, stop, kind).to(FLOAT8)
        made = Weights(values, scales)
        yield values.float(), expected.values.float()
        small = torch.randn(EXPERTS, stop - 64, 16, generator=draw)
        yield (
            rows_matmul(
                operand(Rows(rows.to(device), by_token), float8=True), made, here,
                update=Update(low.to(device), small.to(device), 0.75),
                out=torch.empty(len(low), stop - 64, device=device),
            ),
            rows_matmul(
                operand(Rows(rows, by_token), float8=True), expected, plain,
                update=Update(low, small, 0.75), out=torch.empty(len(low), stop - 64),
            ),
        )  # fmt: skip
