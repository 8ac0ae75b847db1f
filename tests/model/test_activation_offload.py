"""Activations kept in host memory: what travels, and that backward gets what forward saved."""

import pytest
import torch

from workflow.lib.model.activation_offload import ActivationOffload

CPU = torch.device("cpu")
WIDE = 64


def gradients(offload, *, strided=False):
    """Gradient of a matmul of two nodes that save the same bytes, one as a matrix and one as a
    cube."""
    x = torch.linspace(-1, 1, 6 * WIDE).requires_grad_()
    y = x * 3
    if strided:
        y = y.view(WIDE, 6).t()  # rows with gaps between their elements
        y = y[:, ::2]

    def loss():
        wide = y.reshape(-1) if strided else y
        return (y.sin().sum() + wide.view(2, 3, -1).cos().square().sum()) * 2

    if offload is None:
        loss().backward()
    else:
        with offload.forward():
            total = loss()
        total.backward()
    assert x.grad is not None
    return x.grad


def test_bytes_that_two_nodes_save_travel_once():
    offload = ActivationOffload(CPU, window_bytes=4096)
    assert torch.equal(gradients(offload), gradients(None))
    size = 6 * WIDE * 4
    assert (
        offload.host_bytes == 2 * size
    )  # of y, which sin and cos save, and of the cosine, which square saves


def test_tensors_with_gaps_come_back_as_they_were():
    offload = ActivationOffload(CPU, window_bytes=4096)
    assert torch.equal(gradients(offload, strided=True), gradients(None, strided=True))
    assert offload.host_bytes > 0


def test_buffers_are_used_again_by_the_next_pass():
    offload = ActivationOffload(CPU, window_bytes=4096)
    gradients(offload)
    host_bytes = offload.host_bytes
    assert torch.equal(gradients(offload), gradients(None))
    assert offload.host_bytes == host_bytes


def test_a_tensor_changed_in_place_before_backward_is_an_error():
    offload = ActivationOffload(CPU, window_bytes=4096)
    x, other = torch.ones(WIDE, requires_grad=True), torch.linspace(0, 1, WIDE)
    with offload.forward():
        first = (x * other).sum()  # saves `other`
        other.add_(1)
        second = (x * other).sum()  # and its new values
    second.backward()
    assert torch.equal(x.grad, other)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="256 bytes that backward needs was changed"):
        first.backward()
