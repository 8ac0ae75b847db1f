"""The compiled kernels against bitsandbytes, bit by bit, and against autograd; attention over
packed documents."""

from itertools import accumulate

import pytest
import torch
from torch import nn

from tests.support.attention_cases import PACKED, packed
from tests.support.kernel_cases import (
    ACTIVATIONS,
    RANKS,
    RUNS,
    SHAPES,
    act_and_mul_results,
    decoded,
    droppings,
    lengthened_values,
    lengthenings,
    norms,
    rotations,
    sums_by_token,
    sums_with_low_rank,
)
from tests.support.ops import IN_FLOAT8, all_ops, variants_in
from tests.support.recurrence_cases import convolutions, gated_norms
from workflow.lib.kernels.attention.flex import all_scores, flex_arguments, flex_attention
from workflow.lib.kernels.attention.flex_masks import MaskKind, first_keys
from workflow.lib.kernels.attention.packed import varlen_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_run")]


@pytest.mark.parametrize("name", [*all_ops()])
def test_kernel_of_every_op_is_right_by_its_trial(name):
    """Else training would do without it."""
    dtype = torch.float8_e4m3fn if name in IN_FLOAT8 else torch.bfloat16
    if name in IN_FLOAT8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8")
    for variant in variants_in(name, dtype):
        assert all_ops()[name].fault(torch.device("cuda", 0), *variant) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("block_size", "double_quant"), [(64, True), (64, False), (256, True)])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 8192)], ids=str)
def test_decoding_equals_bitsandbytes_bit_by_bit(shape, block_size, double_quant, dtype):
    weights, expected = decoded(
        shape, block_size=block_size, double_quant=double_quant, dtype=dtype, device="cuda"
    )
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("runs", RUNS, ids=str)
def test_decoding_of_parts_equals_bitsandbytes_bit_by_bit(runs, double_quant):
    weights, expected = decoded(
        (1000, 320), block_size=64, double_quant=double_quant, dtype=torch.bfloat16,
        device="cuda", runs=runs,
    )  # fmt: skip
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("halves", [False, True], ids=["two values", "halves of one"])
def test_activation_and_product_equal_autograd(activation, ranks, halves):
    """Matmuls of values up to 60 here, so off by 2^-9 of them."""
    product, again, of_gate, of_up, *expected = act_and_mul_results(
        activation, ranks, halves=halves, dtype=torch.bfloat16, device="cuda"
    )
    results = [x.float() for x in (product, of_gate, of_up)]
    torch.testing.assert_close(results, expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(product, again)


SIXTEEN_BITS, FP32 = [torch.bfloat16, torch.float16], torch.float32
# Kernels that round once, their types, and bounds: fp32 may lie on either side of the middle of two
# values. Gradients of a row of zeros are up to a thousand times the others.
ROUNDED = {
    "parts of low rank": (sums_with_low_rank, [*SIXTEEN_BITS, FP32], 2**-7, 1e-4),
    "sums of a token's rows": (sums_by_token, [torch.bfloat16, FP32], 2**-8, 1e-6),
    "norms": (norms, [torch.bfloat16, FP32], 2**-7, 1e-4),
    "row lengths": (lengthened_values, [*SIXTEEN_BITS, FP32], 0.0, 0.0),
    "short convolutions": (convolutions, [*SIXTEEN_BITS, FP32], 2**-7, 1e-5),
    "gated norms": (gated_norms, [*SIXTEEN_BITS, FP32], 2**-7, 1e-4),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, case in ROUNDED.items() for dtype in case[1]]
)
def test_kernel_rounds_once(name, dtype):
    made, _, rtol, atol = ROUNDED[name]
    results = made(dtype=dtype, device="cuda")
    expected = [exact.to(dtype) for exact in results[1::2]]
    torch.testing.assert_close(results[::2], expected, rtol=rtol, atol=atol)


def test_rotation_equals_its_definition_and_turns_back():
    results = [x.float() for x in rotations(dtype=torch.bfloat16, device="cuda")]
    torch.testing.assert_close(results[::2], results[1::2], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dropout_drops_what_the_cpu_drops_bit_by_bit(dtype):
    results = droppings(dtype=dtype, device="cuda")
    assert all(map(torch.equal, results[::2], results[1::2]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("halves", [False, True], ids=["two values", "halves of one"])
def test_backward_of_row_lengths_equals_autograd(activation, halves):
    """Of bf16, so values and gradients are off by 2^-8, and sums of 131 of them by less."""
    made = lengthenings(activation, halves=halves, dtype=torch.bfloat16, device="cuda")
    results = [x.float() for x in made]
    torch.testing.assert_close(results[::2], results[1::2], rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("lengths", [(128, 128, 128), (100, 28, 256)], ids=["alike", "unlike"])
@pytest.mark.parametrize("width", [64, 512])
def test_attention_stays_within_documents(lengths, width):
    """Of documents of one length, which cuDNN takes from Hopper on, of others, and of heads that
    only our kernels serve; against each document by itself in fp32."""
    draw = torch.Generator().manual_seed(0)
    total, heads = sum(lengths), {"query": 4, "key": 2, "value": 2}
    given = {
        name: torch.randn(1, count, total, width, generator=draw)
        .to("cuda", torch.bfloat16)
        .requires_grad_()
        for name, count in heads.items()
    }
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    output, _ = varlen_attention(
        nn.Module(), **given, attention_mask=None, cu_seq_lens_q=bounds, max_length_q=max(lengths)
    )
    parts = zip(*(x.float().split(lengths, dim=2) for x in given.values()), strict=True)
    expected = torch.cat(
        [
            nn.functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
            for x in parts
        ],
        dim=2,
    ).transpose(1, 2)
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)
    weights = torch.randn(output.shape, generator=draw).to("cuda")
    inputs = [*given.values()]
    gradients, exact = (
        torch.autograd.grad((y.float() * weights).sum(), inputs) for y in (output, expected)
    )
    torch.testing.assert_close(gradients, exact, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_attention_within_documents_equals_torch(case):
    """Twice, with the same bits."""
    results, again = (packed(case, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for ours, expected in zip(results[::2], results[1::2], strict=True):
        assert (ours - expected).norm() < 1e-2 * expected.norm()
    assert all(map(torch.equal, results, again))


FLEX = {
    "soft-capped": {"softcap": 2.0},
    "sinks, window": {"s_aux": torch.tensor([0.5, -1.0, 3.0, 0.0, 1.0, 2.0]), "sliding_window": 50},
    "narrow values": {"value_width": 32},
}


@pytest.mark.parametrize("case", FLEX)
def test_flex_attention_equals_all_scores(case):
    """Output and gradients against fp32, of rows that are no multiple of a block."""
    torch.compiler.reset()  # torch 2.11 compiles no second cap in a process
    told = {k: v.cuda() if k == "s_aux" else v for k, v in FLEX[case].items()}
    draw = torch.Generator().manual_seed(0)
    sizes = [(6, 64), (3, 64), (3, told.pop("value_width", 64))]
    given = [
        torch.randn(2, heads, 301, width, generator=draw)
        .to("cuda", torch.bfloat16)
        .requires_grad_()
        for heads, width in sizes
    ]
    lengths = [[301], [128, 1, 99, 73]]
    rows = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).cuda()
    output, _ = flex_attention(nn.Module(), *given, None, **flex_arguments(rows), **told)
    expected = all_scores(
        *(x.float() for x in given),
        first_keys(rows, MaskKind(told.get("sliding_window"))),
        scale=64**-0.5,
        softcap=told.get("softcap"),
        sinks=told.get("s_aux"),
    )
    torch.testing.assert_close(output.float(), expected, rtol=2e-2, atol=2e-2)
    weights = torch.randn(output.shape, generator=draw).cuda()
    gradients, exact = (
        torch.autograd.grad((y.float() * weights).sum(), given) for y in (output, expected)
    )
    torch.testing.assert_close(gradients, exact, rtol=3e-2, atol=3e-2)


def test_flex_attention_serves_short_rows_of_several_lengths():
    """One kernel: torch's own for rows below 128 tokens does not compile for a second length."""
    draw = torch.Generator().manual_seed(0)
    for length in (37, 100, 300, 64):
        rows = torch.arange(length, device="cuda").expand(2, -1)
        given = [
            torch.randn(2, heads, length, 32, generator=draw).to("cuda", torch.bfloat16)
            for heads in (4, 2, 2)
        ]
        output, _ = flex_attention(nn.Module(), *given, None, **flex_arguments(rows))
        first = first_keys(rows, MaskKind(None))
        exact = all_scores(
            *(x.float() for x in given), first, scale=32**-0.5, softcap=None, sinks=None
        )
        torch.testing.assert_close(output.float(), exact, rtol=2e-2, atol=2e-2)
