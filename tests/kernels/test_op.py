"""Every op of the table against its reference, and when an op takes its kernel."""

import ast
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.ops import all_ops, variants_in_fp32
from workflow.lib import kernels
from workflow.lib.kernels.kernel_launch import INSTALLED, launch
from workflow.lib.kernels.op import OPS, Decision, Key, Op, gradients_alone

CPU = torch.device("cpu")
# What Triton says there, and Python without Triton.
WITHOUT_A_GPU = ("No module named 'triton'", "0 active drivers")


@pytest.mark.skipif(not INSTALLED, reason="Triton is not installed: PyTorch for CPUs needs none")
def test_kernels_compute_what_their_references_do():
    """By Triton's interpreter, in one process."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.support.kernel_claims"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_grid_that_a_gpu_refuses_is_not_launched():
    """The first axis may have 2^31 programs, the others 65,535; found by a recording, too."""
    with pytest.raises(AssertionError, match=r"experts\.gated: a GPU refuses \(1, 65536\)"):
        launch("experts.gated", (1, 2**16), torch.empty(1))


def test_launched_kernels_are_those_of_the_triton_code():
    """By their names, which are text where they are launched."""
    folder = Path(kernels.__path__[0])
    defined = {
        f"{path.stem}.{node.name}"
        for path in folder.glob("triton_code/*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    launched = {
        node.value
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and str(node.value).partition(".")[0] in STEMS(folder)
    }
    named = {name for name in launched if name.count(".") == 1 and name.partition(".")[2]}
    assert named <= defined
    assert len(named) > 20


def STEMS(folder):  # noqa: N802
    return {path.stem for path in folder.glob("triton_code/*.py")}


def table():
    return [*all_ops()]


@pytest.mark.parametrize("name", table())
def test_cpus_take_the_reference(name):
    assert not OPS[name].works_on(CPU)


def made_op(*, kernel):
    name = "a test"
    OPS.pop(name, None)
    op = Op(name, reference=torch.square, kernel=kernel, case=lambda device, *_: (torch.ones(3),))
    del OPS[name]
    return op


@pytest.mark.skipif(not INSTALLED, reason="without Triton no kernel is tried")
def test_kernel_that_computes_something_else_is_at_fault():
    assert made_op(kernel=lambda x: x.square().bfloat16()).fault(CPU) is None
    fault = made_op(kernel=lambda x: 1.1 * x.square()).fault(CPU)
    assert fault.startswith("it computes something else on this GPU")
    assert made_op(kernel=lambda x: x.square() * float("nan")).fault(CPU) == fault


@pytest.mark.skipif(not INSTALLED, reason="without Triton no kernel is tried")
def test_kernel_that_cannot_be_built_is_at_fault():
    def kernel(x):
        raise RuntimeError("out of resource: shared memory\nRequired: 1")

    fault = made_op(kernel=kernel).fault(CPU)
    assert fault.startswith("it cannot be built here (out of resource: shared memory)")


def test_kernel_is_tried_once_and_its_fault_said_once(caplog):
    decision, tried = Decision(), []

    def fault():
        tried.append(1)
        return "no compiler"

    with caplog.at_level(logging.WARNING, logger="workflow"):
        for name in ("norms", "norms", "gates"):
            assert not decision.allows(Key(name, (torch.bfloat16,)), CPU, fault)
    assert len(tried) == 2
    assert [x.getMessage() for x in caplog.records] == [
        "The kernel for norms is not used: no compiler."
    ]


def test_kernel_that_another_process_cannot_use_is_not_used(caplog):
    decision, key, other = Decision(), Key("norms", ()), Key("gates", ())
    assert decision.allows(key, CPU, lambda: None)
    with caplog.at_level(logging.WARNING, logger="workflow"):
        decision.adopt({key: "no compiler", other: "no compiler"})
    assert not decision.allows(key, CPU, lambda: None)
    assert not decision.allows(other, CPU, lambda: None)
    assert "The kernel for norms is not used: on another process: no compiler." in caplog.messages


@pytest.mark.parametrize("name", table())
def test_first_use_within_a_recomputed_layer_leaves_the_layer_alone(name, monkeypatch):
    monkeypatch.setattr("workflow.lib.kernels.op.INSTALLED", True)
    op = replace(OPS[name], name="a test", kernel=OPS[name].reference)
    del OPS["a test"]
    found = []

    def layer(x):
        if not found:
            found.append([op.fault(CPU, *variant) for variant in variants_in_fp32(name)])
        return x.exp().sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    if any(reason in str(fault) for fault in found[0] for reason in WITHOUT_A_GPU):
        pytest.skip("its reference is a kernel, too")
    assert {*found[0]} == {None}


@torch.no_grad()
def test_hooks_of_a_model_see_nothing_of_a_trial():
    seen = []

    def packed(x):
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x), gradients_alone():
        x = torch.ones(3, requires_grad=True)
        (of_x,) = torch.autograd.grad(x.square().sum(), x)
    assert torch.equal(of_x, torch.full((3,), 2.0))
    assert seen == []
