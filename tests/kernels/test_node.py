"""An operation as one node: what it keeps between forward and backward."""

import gc
import weakref
from functools import partial

import torch

from workflow.lib.kernels.op import keeping


def test_node_with_a_backward_of_its_own_keeps_nothing_that_its_forward_was_given():
    given = torch.ones(3)
    gone = weakref.ref(given)

    def forward(x, *, copy):
        return x * copy

    x = torch.ones(3, requires_grad=True)
    y = keeping(1, partial(forward, copy=given), lambda grad, x: 2 * grad)(x)
    del given
    gc.collect()
    assert gone() is None
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
