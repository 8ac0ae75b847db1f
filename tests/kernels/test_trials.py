"""Kernels are compared with torch's operations on the GPU at hand."""

import logging

import pytest
import torch

from workflow.lib.kernels.trials import are_right, gradients_alone


def test_rounding_is_right_and_anything_else_is_not(caplog: pytest.LogCaptureFixture) -> None:
    exact = [torch.randn(50, generator=torch.Generator().manual_seed(0)) for _ in "ab"]
    with caplog.at_level(logging.WARNING, logger="workflow"):
        assert are_right(lambda: [x.bfloat16() for x in exact], exact, of="a rule")
        assert not caplog.records
        assert not are_right(lambda: [exact[0], 1.1 * exact[1]], exact, of="a rule")
        assert not are_right(lambda: [exact[0], exact[1] * float("nan")], exact, of="a rule")
    assert [record.getMessage() for record in caplog.records] == 2 * [
        "Kernels of a rule compute something else on this GPU: they are not used, and steps take "
        "longer."
    ]


def test_kernels_that_cannot_be_built_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def made() -> list[torch.Tensor]:
        raise RuntimeError("out of resource: shared memory\nRequired: 1")

    with caplog.at_level(logging.WARNING, logger="workflow"):
        assert not are_right(made, [torch.ones(1)], of="a rule")
    assert [record.getMessage() for record in caplog.records] == [
        "Kernels of a rule cannot be built here (out of resource: shared memory): steps take "
        "longer."
    ]


@torch.no_grad()
def test_hooks_of_a_model_see_nothing_of_it() -> None:
    seen: list[torch.Tensor] = []

    def packed(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x), gradients_alone():
        x = torch.ones(3, requires_grad=True)
        (of_x,) = torch.autograd.grad(x.square().sum(), x)
    assert torch.equal(of_x, torch.full((3,), 2.0))
    assert seen == []
