"""What GPU kernels must compute, claim by claim, for Triton's interpreter: `python -m
tests.support.kernel_claims` with TRITON_INTERPRET=1. It cuts off where a GPU rounds to bf16, so
values here are fp32; `tests/gpu` has the rest. Every function without an underscore is a claim."""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close

from tests.support import attention_cases, eight_bit_cases, expert_kernel_cases
from tests.support import feed_forward_cases as feed_forward
from tests.support import kernel_cases as cases
from tests.support import recurrence_cases as recurrences
from tests.support import rounding_cases as rounding
from tests.support.ops import all_ops, variants_in_fp32
from workflow.lib.kernels.op import Op
from workflow.lib.model import fused_feed_forward

THERE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


# Kernels whose results are followed by those in fp32, and bounds.
PAIRS = (
    (cases.sums_with_low_rank, 1e-5, 1e-5),
    (cases.rotations, 1e-5, 1e-5),
    (cases.sums_by_token, 1e-6, 1e-6),
    (cases.norms, 1e-5, 1e-5),
    (cases.lengthened_values, 1e-6, 1e-6),
    (recurrences.convolutions, 1e-5, 1e-5),
    (recurrences.gated_norms, 1e-5, 1e-4),
)


def _pairs_agree(results: list[torch.Tensor], *, rtol: float, atol: float) -> None:
    assert_close(results[::2], results[1::2], rtol=rtol, atol=atol)


def results_are_those_in_fp32() -> None:
    for made, rtol, atol in PAIRS:
        _pairs_agree(made(**THERE), rtol=rtol, atol=atol)


def each_op_is_its_reference() -> None:
    for name, op in all_ops().items():
        for variant in variants_in_fp32(name):
            fault = op.fault(torch.device("cpu"), *variant)
            assert fault is None, (name, variant, fault)


def decoding() -> None:
    for shape, (block_size, double) in itertools.product(
        cases.SHAPES, ((64, True), (64, False), (256, True))
    ):
        made = cases.decoded(shape, block_size=block_size, double_quant=double, **THERE)
        assert torch.equal(*made), (shape, block_size, double)
    for strides, double in itertools.product(cases.RUNS, (True, False)):
        made = cases.decoded((1000, 320), block_size=64, double_quant=double, runs=strides, **THERE)
        assert torch.equal(*made), (strides, double)


def gates_of_feed_forwards() -> None:
    for activation, ranks, halves in itertools.product(
        cases.ACTIVATIONS, cases.RANKS, (False, True)
    ):
        results = cases.act_and_mul_results(activation, ranks, halves=halves, **THERE)
        product, again, of_gate, of_up, *expected = results
        assert_close([product, of_gate, of_up], expected, rtol=1e-5, atol=1e-3)
        assert torch.equal(product, again)


def dropout() -> None:
    results = cases.droppings(**THERE)
    assert all(map(torch.equal, results[::2], results[1::2]))


def row_lengths() -> None:
    for activation, halves in itertools.product(cases.ACTIVATIONS, (False, True)):
        results = cases.lengthenings(activation, halves=halves, **THERE)
        _pairs_agree(results, rtol=1e-5, atol=1e-4)


def the_gated_delta_rule() -> None:
    assert recurrences.largest_error(recurrences.deltas(**THERE)) < 2e-5


def the_state_space() -> None:
    assert recurrences.largest_error(recurrences.spaces(**THERE)) < 2e-5


def attention_within_documents() -> None:
    for case in attention_cases.PACKED:
        _pairs_agree(attention_cases.packed(case, **THERE), rtol=1e-5, atol=1e-5)


def matmuls_in_8_bits() -> None:
    for one, other in eight_bit_cases.weights_and_activations(device="cpu", interpreted=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def experts() -> None:
    made = expert_kernel_cases
    for case in (
        made.matmuls(width=96, columns=200, rank=3, num_tokens=150, **THERE),
        made.matmuls(width=40, columns=12, rank=70, num_tokens=5, **THERE),
        made.sums(columns=150, rank=3, num_tokens=150, **THERE),
        made.sums(columns=20, rank=70, num_tokens=5, **THERE),
        made.gates(width=1100, num_tokens=5, **THERE),
        made.transpositions(**THERE),
        made.float8_matmuls(width=192, columns=320, num_tokens=40, device="cpu", interpreted=True),
    ):
        for ours, expected in case:
            assert_close(ours, expected, rtol=1e-5, atol=1e-4)


def calibrated_rounding() -> None:
    """128 columns, and the last ones of a weight; rows that are no whole programs; scales of 0."""
    for shape in rounding.SHAPES:
        kernel, loop = rounding.columns(shape, device="cpu")
        assert all(map(torch.equal, kernel, loop)), shape
        assert len(loop[0].unique()) == (16 if shape[1] > 1 else 4), shape


def feed_forward_in_one_node() -> None:
    """The last one: it has all operations take kernels."""
    fused_feed_forward._fits_node = lambda layer: True
    for kind, into in itertools.product(feed_forward.FACTORS, feed_forward.INTO):
        results = []
        for on in (False, True):
            _take_kernels(on)
            with tempfile.TemporaryDirectory() as folder:
                made = feed_forward.values_and_gradients(Path(folder), kind, into=into)
                results.append(made)
        for one, other in zip(*results, strict=True):
            assert_close(other, one, rtol=0, atol=1e-6 * float(one.abs().max()))


def _take_kernels(on: bool) -> None:
    Op.works_on = lambda self, device, *variant: on
    Op.takes_kernel = lambda self, *args, **options: on


if __name__ == "__main__":
    for name, claim in [*globals().items()]:
        if getattr(claim, "__module__", "") == __name__ and not name.startswith("_"):
            print(f"claim: {name}", file=sys.stderr, flush=True)
            claim()
