"""The GPU kernels by Triton's interpreter, where Triton is installed; and what happens where it is
not.

The interpreter cuts off where a GPU rounds to bf16, so values here are fp32; `tests/gpu` has the
rest.
"""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.kernel_cases import ACTIVATIONS, SHAPES
from workflow.lib.kernels import elementwise as kernels

DECODED = """
import torch
from tests.support.kernel_cases import SHAPES, decoded
for shape in SHAPES:
    for block_size, double_quant in ((64, True), (64, False), (256, True)):
        weights, expected = decoded(
            shape, block_size=block_size, double_quant=double_quant,
            dtype=torch.float32, device="cpu",
        )
        assert torch.equal(weights, expected), (shape, block_size, double_quant)
"""
DECODED_RUNS = """
import torch
from tests.support.kernel_cases import RUNS, decoded
for runs in RUNS:
    for double_quant in (True, False):
        weights, expected = decoded(
            (1000, 320), block_size=64, double_quant=double_quant,
            dtype=torch.float32, device="cpu", runs=runs,
        )
        assert torch.equal(weights, expected), (runs, double_quant)
"""
ACT_AND_MUL = """
import itertools, torch
from tests.support.kernel_cases import ACTIVATIONS, RANKS, act_and_mul_results
for activation, ranks, halves in itertools.product(ACTIVATIONS, RANKS, (False, True)):
    results = act_and_mul_results(
        activation, ranks, halves=halves, dtype=torch.float32, device="cpu"
    )
    product, again, of_gate, of_up, *expected = results
    torch.testing.assert_close([product, of_gate, of_up], expected, rtol=1e-5, atol=1e-3)
    assert torch.equal(product, again)
"""
LOW_RANK = """
import torch
from tests.support.kernel_cases import sums_with_low_rank
from workflow.lib.kernels import elementwise as kernels
kernels.usable = lambda device: True
results = sums_with_low_rank(dtype=torch.float32, device="cpu")
torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-5)
"""
ROTARY = """
import torch
from tests.support.kernel_cases import rotations
results = rotations(dtype=torch.float32, device="cpu")
torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-5)
"""
DROPPED = """
import torch
from tests.support.kernel_cases import droppings
results = droppings(dtype=torch.float32, device="cpu")
assert all(map(torch.equal, results[::2], results[1::2]))
"""
LENGTHENED = """
import itertools, torch
from tests.support.kernel_cases import ACTIVATIONS, lengthenings
for activation, halves in itertools.product(ACTIVATIONS, (False, True)):
    results = lengthenings(activation, halves=halves, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-4)
"""


SUMMED = """
import torch
from tests.support.kernel_cases import sums_by_token
results = sums_by_token(dtype=torch.float32, device="cpu")
torch.testing.assert_close(results[::2], results[1::2], rtol=1e-6, atol=1e-6)
"""
NORMS = """
import torch
from tests.support.kernel_cases import norms
results = norms(dtype=torch.float32, device="cpu")
torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-5)
"""
CONVOLUTIONS = """
import torch
from tests.support.recurrence_cases import convolutions
results = convolutions(dtype=torch.float32, device="cpu")
torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-5)
"""
GATED_NORMS = """
import torch
from tests.support.recurrence_cases import gated_norms
results = gated_norms(dtype=torch.float32, device="cpu")
torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-4)
"""
DELTA_RULE = """
import torch
from tests.support.recurrence_cases import deltas, largest_error
assert largest_error(deltas(dtype=torch.float32, device="cpu")) < 2e-5
"""
STATE_SPACE = """
import torch
from tests.support.recurrence_cases import largest_error, spaces
assert largest_error(spaces(dtype=torch.float32, device="cpu")) < 2e-5
"""
WIDE_ATTENTION = """
import torch
from tests.support.attention_cases import WIDE_HEADS, wide_heads
for case in WIDE_HEADS:
    results = wide_heads(case, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(results[::2], results[1::2], rtol=1e-5, atol=1e-5)
"""
FEED_FORWARD = """
import itertools, tempfile, torch
from pathlib import Path
from tests.support import feed_forward_cases as cases
from workflow.lib.model import fused_feed_forward
from workflow.lib.kernels import elementwise as kernels
fused_feed_forward._fits_node = lambda layer: True
for kind, into, products in itertools.product(cases.FACTORS, cases.INTO, (None, "int8")):
    results = []
    for on in (False, True):
        kernels.usable = lambda device, on=on: on
        with tempfile.TemporaryDirectory() as folder:
            results.append(cases.values_and_gradients(
                Path(folder), kind, into=into, products=products, dtype=torch.float32, device="cpu"
            ))
    # A value that 8 bits round the other way after a rounding of fp32 is off by a 127th.
    share = 1e-6 if products is None else 1e-3
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=share * float(one.abs().max()))
"""
EIGHT_BITS = """
import torch
from tests.support import eight_bit_cases as cases
for form in cases.FORMATS.values():
    for case in (cases.weights_and_activations, cases.copies_of_norms):
        for one, other in case(form, device="cpu", interpreted=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), form.name
for one, other in cases.int8_products(device="cpu"):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-3)
"""
TAKEN = """
import tempfile, torch
from pathlib import Path
from tests.support.feed_forward_cases import passes_behind_a_norm
from workflow.lib.kernels import elementwise as kernels
kernels.usable = lambda device: True
with tempfile.TemporaryDirectory() as folder:
    rounding, taking = passes_behind_a_norm(
        Path(folder), products="int8", dtype=torch.float32, device="cpu"
    )
assert all(map(torch.equal, rounding, taking))
"""
EXPERTS = """
import torch
from tests.support.expert_kernel_cases import float8_products, gates, products, sums
there = {"dtype": torch.float32, "device": "cpu"}
for case in (
    products(width=96, columns=200, rank=3, num_tokens=150, **there),
    products(width=40, columns=12, rank=70, num_tokens=5, **there),
    sums(columns=150, rank=3, num_tokens=150, **there),
    sums(columns=20, rank=70, num_tokens=5, **there),
    gates(width=1100, num_tokens=5, **there),
    float8_products(width=192, columns=320, num_tokens=40, device="cpu", interpreted=True),
):
    for ours, expected in case:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)
"""
RESTORED = """
import torch
from tests.support.eight_bit_cases import restored_rows
for one, other in restored_rows(dtype=torch.float32, device="cpu", interpreted=True):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
"""


@pytest.mark.skipif(
    not kernels.INSTALLED, reason="Triton is not installed: PyTorch for CPUs needs none"
)
@pytest.mark.parametrize(
    "claims",
    [
        DECODED,
        DECODED_RUNS,
        ACT_AND_MUL,
        LOW_RANK,
        ROTARY,
        DROPPED,
        LENGTHENED,
        SUMMED,
        NORMS,
        CONVOLUTIONS,
        GATED_NORMS,
        DELTA_RULE,
        STATE_SPACE,
        WIDE_ATTENTION,
        FEED_FORWARD,
        EIGHT_BITS,
        RESTORED,
        TAKEN,
        EXPERTS,
    ],
    ids=[
        "decoding",
        "decoding of parts",
        "activation and product",
        "parts of low rank",
        "rotary positions",
        "dropout",
        "row lengths",
        "sums by token",
        "norms",
        "short convolutions",
        "gated norms",
        "the gated delta rule",
        "the state space",
        "attention with wide heads",
        "feed-forward in one node",
        "products in 8 bits",
        "rows of 8 bits",
        "copies of norms",
        "experts",
    ],
)
def test_kernels_compute_what_the_libraries_do(claims: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", claims], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_cpu_does_without_the_kernels() -> None:
    assert not kernels.usable(torch.device("cpu"))


def test_kernels_know_the_activations_of_the_fused_layers() -> None:
    from workflow.lib.model.fused_feed_forward import ACTIVATIONS as FUSED

    assert FUSED.keys() == ACTIVATIONS.keys()
    assert SHAPES
