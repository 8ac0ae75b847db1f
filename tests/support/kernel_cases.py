"""What the GPU kernels must compute, on any device: by Triton's interpreter on the CPU, compiled on
a GPU."""

from typing import Any

import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from torch import nn

from workflow.lib.kernels.experts.grouped_matmul import PROGRAM_ELEMENTS, sum_by_token
from workflow.lib.kernels.nf4 import decode
from workflow.lib.kernels.nf4.decode import BlockStrides, NF4Data, dequantize_nf4
from workflow.lib.kernels.rows import norm
from workflow.lib.kernels.rows.dropout import Draw, drop, dropped
from workflow.lib.kernels.rows.gating import (
    Gating,
    LowRank,
    act_and_mul,
    act_and_mul_backward_,
    add_low_rank_,
    lengthen,
    lengthen_backward,
    lengthened_act_and_mul_backward_,
)
from workflow.lib.kernels.rows.rotary import rotate
from workflow.lib.model.layers.adapter_dropout import row_keys
from workflow.lib.model.layers.fused_norm import FusedNorm

ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}
# out, in: a whole number of programs, a last one that is not full, more than one nested block; rows
# that are not whole blocks
# blocks of 64 weights: columns of rows, rows of experts, experts; more than a program of each
RUNS = (BlockStrides(1, 3, 5), BlockStrides(7, 90, 100), BlockStrides(300, 500, 5000))
SHAPES = ((64, 256), (70, 512), (300, 256), (96, 80))


def decoded(
    shape: tuple[int, int],
    *,
    block_size: int,
    double_quant: bool,
    dtype: torch.dtype,
    device: str,
    runs: BlockStrides | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random NF4 weights as the kernel decodes them, and as bitsandbytes does; runs: of
    their blocks, all of which are whole."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(shape, generator=draw).to(device, dtype)
    packed, state = quantize_4bit(
        weights, blocksize=block_size, compress_statistics=double_quant, quant_type="nf4"
    )
    assert isinstance(state, QuantState)
    data = NF4Data.of(packed, state)
    expected = decode.decoded(packed, state)
    if runs is not None:
        starts = range(runs.first, expected.numel() // block_size, runs.stride)
        blocks = expected.view(-1, block_size)
        expected = torch.cat([blocks[start : start + runs.length] for start in starts])
    return dequantize_nf4.kernel(torch.empty_like(expected), data, runs), expected


def low_rank_part(
    width: int, rank: int, *, draw: torch.Generator, dtype: torch.dtype, device: str
) -> LowRank:
    """Return a part of 50 rows as a node has it: the last columns of all adapters' `low`, and B or
    A as it is stored."""
    low = torch.randn(50, 3 + rank, generator=draw).to(device, dtype)[:, 3:]
    small = torch.randn(width, rank, generator=draw).to(device, dtype).t()
    return LowRank(low, small if rank % 2 else small.contiguous(), 0.3)


def exact(value: torch.Tensor, part: LowRank) -> torch.Tensor:
    """Return a value with its part, fp32."""
    return value.float() + part.scale * (part.low.float() @ part.small.float())


# of gate, up and their matmul's gradient: none, less than tiles have, and more than a chunk
RANKS = ((0, 0, 0), (5, 16, 8), (70, 5, 0))


def gates(
    gate: torch.Tensor, up: torch.Tensor, *, halves: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if not halves:
        return gate.clone(), up.clone()
    one, other = torch.cat((gate, up), dim=-1).chunk(2, dim=-1)
    return one, other


def act_and_mul_results(
    activation: str, ranks: tuple[int, int, int], *, halves: bool, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """Return act(0.7 gate) * up and its gradients, of values that lack parts of low rank: the
    kernels', then autograd's in fp32. Rows and columns are no whole tiles. halves: as in `gates`.
    """
    draw = torch.Generator().manual_seed(0)
    options = {"draw": draw, "dtype": dtype, "device": device}
    given = [2 * torch.randn(50, 150, generator=draw).to(device, dtype) for _ in range(3)]
    parts = [low_rank_part(150, rank, **options) for rank in ranks]
    whole = [exact(value, part) for value, part in zip(given, parts, strict=True)]
    leaves = [x.requires_grad_() for x in whole[:2]]
    expected = ACTIVATIONS[activation](0.7 * leaves[0]) * leaves[1]
    gradients = torch.autograd.grad(expected, leaves, whole[2])
    gate, up = gates(*given[:2], halves=halves)
    grad = given[2]
    gating = Gating(activation, 0.7)
    product = act_and_mul.kernel(gate, up, *parts[:2], gating)
    in_place = (parts[0], parts[1], parts[2])
    act_and_mul_backward_.kernel(grad, gate, up, in_place, gating)
    return [product, grad, gate, up, expected.detach(), *gradients]


def sums_with_low_rank(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return values to which the kernel adds a part, and another value, each followed by the sum in
    fp32."""
    draw = torch.Generator().manual_seed(0)
    results = []
    for width, rank in ((150, 5), (40, 16), (300, 70)):
        part = low_rank_part(width, rank, draw=draw, dtype=dtype, device=device)
        total, other = (torch.randn(50, width, generator=draw).to(device, dtype) for _ in range(2))
        expected = exact(total, part)
        results += [add_low_rank_.kernel(total.clone(), part), expected]
        results += [add_low_rank_.kernel(total.clone(), part, other), expected + other.float()]
    return results


def rotations(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return queries turned forth by the kernel and by its definition, and turned forth and back;
    of whole heads and of 10 of 24 dimensions, of halves and of neighbours; and the same where they
    lie among other heads."""
    draw = torch.Generator().manual_seed(0)
    results = []
    # of angles; a second row of tokens takes the first one's
    for rows, dims, neighbours in ((1, 24, False), (2, 24, True), (2, 10, False), (1, 10, True)):
        x = torch.randn(2, 7, 3, 24, generator=draw).to(device, dtype)
        turn = torch.randn(rows, 7, dims // 2, generator=draw).to(device)
        # a part of a table, with steps between tokens and between pairs
        tables = (f(turn).repeat_interleave(3, dim=-1) for f in (torch.cos, torch.sin))
        cos, sin = (table.to(dtype)[..., ::3] for table in tables)
        pairs = x.float()[..., :dims]
        pairs = pairs.unflatten(-1, (-1, 2)) if neighbours else pairs.unflatten(-1, (2, -1)).mT
        numbers = torch.view_as_complex(pairs.contiguous())
        angles = torch.complex(cos.float(), sin.float())[:, :, None]
        turned_pairs = torch.view_as_real(numbers * angles)
        parts = turned_pairs.flatten(-2) if neighbours else turned_pairs.mT.flatten(-2)
        expected = torch.cat((parts, x.float()[..., dims:]), dim=-1)
        turned = rotate.kernel(x, cos, sin, False, neighbours)
        back = rotate.kernel(turned, cos, sin, True, neighbours)
        results += [turned, expected, back, x.float()]
        part = rotate.kernel(x.repeat(1, 1, 3, 1)[:, :, 3:6], cos, sin, False, neighbours)
        results += [part, expected]
    return results


def droppings(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return rows that the kernel has dropped from, alone and added, each followed by what the CPU
    drops; of one group, of groups that are not full, and of more groups than a program's."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.tensor(row_keys(3, step=2, rows=[5, 2**40]))
    results = []
    for linear, features in ((0, 5), (223, 80), (7, 4219)):
        rows, total = (torch.randn(2 * 11, features, generator=draw).to(dtype) for _ in range(2))
        expected = dropped(rows, Draw(keys, linear, 20_000))
        rows, total, there = rows.to(device), total.to(device), keys.to(device)
        drawn = Draw(there, linear, 20_000)
        added = drop.kernel(total.clone(), rows, drawn, True)
        drop.kernel(rows, rows, drawn)
        results += [rows.cpu(), expected, added.cpu(), (total.cpu() + expected)]
    return results


def lengthened_values(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return values times a factor for each column, each followed by the same in fp32: of a tensor,
    and in place of a half of one. A row has several programs."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5000, generator=draw).to(device, dtype)
    factor = (torch.rand(2500, generator=draw) + 0.5).to(device)
    other, half = values.chunk(2, dim=1)
    untouched, apart, expected = other.clone(), half.clone(), half.float() * factor
    return [
        *(lengthen.kernel(torch.empty_like(apart), apart, factor), expected),
        *(lengthen.kernel(torch.empty_like(apart), half, factor), expected),
        *(lengthen.kernel(half, half, factor), expected),
        *(other, untouched),
    ]


def lengthenings(
    activation: str, *, halves: bool, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    """Return what backward makes of a gated matmul whose parts have row factors, and of a value
    that has one, each followed by autograd's in fp32. halves: as in `gates`."""
    draw = torch.Generator().manual_seed(0)
    shape = (131, 300)  # more rows and columns than a program's, and no multiple
    gate, up, grad = (torch.randn(shape, generator=draw).to(device, dtype) for _ in range(3))
    factors = [(torch.rand(300, generator=draw) + 0.5).to(device).requires_grad_() for _ in "gu"]
    values = zip((gate, up), factors, strict=True)
    sides = [(y.float() / factor).detach().requires_grad_() for y, factor in values]
    lower, upper = (side * factor for side, factor in zip(sides, factors, strict=True))
    product = ACTIVATIONS[activation](0.7 * lower) * upper
    expected = torch.autograd.grad(product, (*sides, *factors), grad.float(), retain_graph=True)
    scaled, total = lengthen_backward.kernel(grad, up, factors[1].detach())
    alone = torch.autograd.grad(upper, (sides[1], factors[1]), grad.float(), retain_graph=True)
    plain = [factor.detach() for factor in factors]
    gate, up = gates(gate, up, halves=halves)
    *_, of_gate, of_up = lengthened_act_and_mul_backward_.kernel(
        grad, gate, up, plain, Gating(activation, 0.7)
    )
    return [
        grad, product.detach(), gate, expected[0], up, expected[1],
        of_gate / plain[0], expected[2], of_up / plain[1], expected[3],
        scaled, alone[0], total / plain[1], alone[1],
    ]  # fmt: skip


def sums_by_token(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return sums of 3 rows of each of 5 tokens, weighted and not, each followed by torch's in
    fp32; of rows of less than a program's columns, and of more."""
    draw = torch.Generator().manual_seed(0)
    places = torch.randperm(15, generator=draw).view(5, 3).to(device)
    results = []
    for width in (40, 2 * PROGRAM_ELEMENTS + 7):
        rows = torch.randn(15, width, generator=draw).to(device, dtype)
        weights = torch.rand(5, 3, generator=draw).to(device, dtype)
        picked = rows[places].float()
        results += [sum_by_token.kernel(rows, places, None), picked.sum(1)]
        weighted = (picked * weights[..., None].float()).sum(1)
        results += [sum_by_token.kernel(rows, places, weights), weighted]
    return results


# rows, width, eps, offset, whether the mean is subtracted, and whether there is a bias: several
# rows a program, and one. A LayerNorm of a row of zeros divides rounding errors by the root of eps.
NORMS = (
    (300, 24, 1e-6, 0.0, False, False),
    (300, 24, 1e-6, 1.0, False, False),
    (5, norm.ELEMENTS + 72, 1e-6, 1.0, False, False),
    (300, 24, 1e-3, 0.0, True, False),
    (300, 24, 1e-3, 1.0, True, True),
    (5, norm.ELEMENTS + 72, 1e-3, 0.0, True, True),
)


def norm_module(
    width: int, *options: Any, draw: torch.Generator, dtype: torch.dtype, device: str
) -> FusedNorm:
    """Return a norm with random weights; options: as in `NORMS`, from eps on."""
    eps, offset, subtracts_mean, biased = options
    weight, bias = (
        nn.Parameter(torch.randn(width, generator=draw).to(device, dtype), requires_grad=False)
        for _ in "wb"
    )
    return FusedNorm(
        weight, eps=eps, offset=offset, subtracts_mean=subtracts_mean, bias=bias if biased else None
    )


def exact_norm(x: torch.Tensor, module: FusedNorm) -> torch.Tensor:
    deviation = x - x.mean(-1, keepdim=True) if module.subtracts_mean else x
    normal = deviation * (deviation.square().mean(-1, keepdim=True) + module.eps).rsqrt()
    y = normal * (module.offset + module.weight.to(x.dtype))
    return y if module.bias is None else y + module.bias.to(x.dtype)


def norms(*, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return norms and gradients of their input by the kernels, each followed by autograd's in
    fp32; of `NORMS`, with a row of zeros."""
    draw = torch.Generator().manual_seed(0)
    results = []
    for num_rows, width, *options in NORMS:
        x, grad = (torch.randn(num_rows, width, generator=draw).to(device, dtype) for _ in "xg")
        x[3] = 0
        module = norm_module(width, *options, draw=draw, dtype=dtype, device=device)
        leaf = x.float().requires_grad_()
        expected = exact_norm(leaf, module)
        (of_x,) = torch.autograd.grad(expected, leaf, grad.float())
        results += [norm.forward(x, module), expected.detach()]
        results += [norm.backward(grad, x, module), of_x]
        wide, slope = (_part_of_wider(y) for y in (x, grad))
        exact = [y.view(wide.shape) for y in (expected.detach(), of_x)]
        for order in ((0, 1, 2, 3), (0, 2, 1, 3)):  # heads of tokens, and tokens of heads
            given, steep, *laid = (y.permute(order) for y in (wide, slope, *exact))
            results += [norm.forward(given, module), laid[0]]
            results += [norm.backward(steep, given, module), laid[1]]
            dense = wide.contiguous().permute(order)
            made = norm.forward(dense, module)
            assert made.stride()[1:] == dense.stride()[1:]  # so nobody copies it
    return results


def _part_of_wider(x: torch.Tensor) -> torch.Tensor:
    """Return rows (R, width) as the heads of tokens, which lie within wider ones."""
    heads = next(count for count in (3, 2, 1) if len(x) % count == 0)
    tokens = x.view(1, -1, heads, x.shape[1])
    wide = torch.zeros(
        1, len(x) // heads, heads + 2, x.shape[1] + 16, dtype=x.dtype, device=x.device
    )
    part = wide[:, :, 1:-1, 8:-8]
    assert not part.is_contiguous()
    return part.copy_(tokens)
