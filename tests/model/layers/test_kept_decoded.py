"""Frozen weights that stay decoded: which forms are kept, when, and that no bit changes."""

import math

import pytest
import torch

from tests.model.experts.test_fused_experts import Pair
from tests.support.adapted_layers import Layer, random
from tests.support.models import nf4_linear, plain_linear
from workflow.lib.kernels.eight_bits.matmul import FLOAT8
from workflow.lib.model.layers import frozen_stack
from workflow.lib.model.layers.frozen_linear import MatmulPrecision, frozen_linear
from workflow.lib.model.layers.lora_matmul import nf4_lora_matmuls
from workflow.lib.model.layers.weight_storage import NF4Spec, PlainSpec

OUT, IN, RANK = 48, 192, 3
DTYPE = torch.bfloat16
WHOLE, ROWS, COLUMNS = (DTYPE, False), (FLOAT8, False), (FLOAT8, True)
PRECISIONS = {
    "compute dtype": ({}, {WHOLE}),
    "float8": ({"forward": True, "backward": True}, {ROWS, COLUMNS}),
    "float8 forward": ({"forward": True}, {ROWS, WHOLE}),
    "float8 backward": ({"backward": True}, {WHOLE, COLUMNS}),
}
STORED = {"nf4": nf4_linear, "16 bits": plain_linear}
in_all = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(params=STORED)
def linear(request, tmp_path):
    return STORED[request.param](tmp_path / "base", random(OUT, IN))


def expected(linear, forms):
    """Of weights in 16 bits nothing is decoded in their own dtype."""
    return forms - {WHOLE} if isinstance(linear.spec, PlainSpec) else forms


def step(linear):
    """Return values and gradients of two linears of one input, with an adapter and without."""
    weights = (random(RANK, IN, seed=6), random(OUT, RANK, seed=8))
    layer = Layer(linear, *(weight.requires_grad_() for weight in weights))
    x, grads = random(6, IN, seed=2).to(DTYPE).requires_grad_(), random(6, OUT, seed=3).to(DTYPE)
    ys = (*nf4_lora_matmuls(x, [layer, layer]), frozen_linear(x, linear, bias=False))
    return [*ys, *torch.autograd.grad(ys, [x, *layer.weights], [grads] * 3)]


def stop_decoding(monkeypatch):
    for spec in (NF4Spec, PlainSpec):
        monkeypatch.setattr(spec, "stored", None)


@in_all
def test_kept_forms_are_those_of_steps_and_change_no_bit(linear, precision, monkeypatch):
    passes, forms = PRECISIONS[precision]
    linear.matmul_precision = types = MatmulPrecision(**passes)
    with types.training_step():
        plain = step(linear)
    linear.kept = {}
    with types.training_step():
        assert all(map(torch.equal, plain, step(linear)))
        assert linear.kept.keys() == expected(linear, forms)
        if expected(linear, forms) == forms:
            stop_decoding(monkeypatch)
        assert all(map(torch.equal, plain, step(linear)))


@in_all
def test_work_outside_of_steps_keeps_nothing_and_changes_no_bit(linear, precision):
    linear.matmul_precision = types = MatmulPrecision(**PRECISIONS[precision][0])
    plain = step(linear)
    linear.kept = {}
    assert all(map(torch.equal, plain, step(linear)))
    with types.in_eight_bits():  # the check of float8
        step(linear)
    assert linear.kept == {}
    with types.training_step():
        step(linear)
    forms = {*linear.kept}
    assert all(map(torch.equal, plain, step(linear)))
    assert linear.kept.keys() == forms


def experts_in(passes):
    pair = Pair("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    types = MatmulPrecision(**passes)
    stacks = [pair.experts.get_submodule(name).get_base_layer() for name in pair.names]
    for stack in stacks:
        stack.matmul_precision = types
    return pair, types, stacks


def gradients(pair):
    return [ours for _, ours, _ in pair.gradients()]


@in_all
def test_kept_stacks_change_no_bit(precision, monkeypatch):
    passes, forms = PRECISIONS[precision]
    pair, types, stacks = experts_in(passes)
    with types.training_step():
        plain = gradients(pair)
        for stack in stacks:
            stack.kept = {}
        assert all(map(torch.equal, plain, gradients(pair)))
        stop_decoding(monkeypatch)
        assert all(map(torch.equal, plain, gradients(pair)))
    kept = {torch.float32 if dtype == DTYPE else dtype: None for dtype, _ in forms}
    for stack in stacks:
        assert len(stack.kept) == len(forms)
        assert {dtype for dtype, _ in stack.kept} == kept.keys()


def num_slices(stack):
    return len([*stack.row_slices(torch.float32)])


@in_all
def test_kept_stacks_are_whole_and_give_what_slices_give(precision, monkeypatch):
    """fp32, in other sums; outside of steps a stack of another form is cut."""
    pair, types, stacks = experts_in(PRECISIONS[precision][0])
    most = stacks[1].spec.decoded_bytes(FLOAT8) // 2
    monkeypatch.setattr(frozen_stack, "DECODED_BYTES", most)
    with types.training_step():
        assert all(num_slices(stack) > 1 for stack in stacks)
        plain = gradients(pair)
        for stack in stacks:
            stack.kept = {}
        for whole, cut in zip(gradients(pair), plain, strict=True):
            torch.testing.assert_close(whole, cut, rtol=1e-5, atol=1e-4)
    for stack in stacks:
        assert {form.numel() for form in stack.kept.values()} == {math.prod(stack.spec.shape)}
        assert (num_slices(stack) == 1) is ((torch.float32, False) in stack.kept)
