"""Recurrent layers begin anew with every packed document."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from workflow.lib.model.documents import document_capacity, documents_of
from workflow.lib.model.prepared_decoder import OneByOne
from workflow.lib.system.errors import UserError

LENGTHS = [[9, 1, 13], [23], [2, 2, 19]]


ALL = [9, 1, 13, 23, 2, 2, 19]
ROOM = tuple(count + 1 for count in document_capacity(ALL, longest=23))  # one long document more


class RunningSum(nn.Module):
    """The simplest recurrent layer: each token's output is the sum of all tokens up to it."""

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return hidden_states.cumsum(dim=1) * (1 if mask is None else mask[..., None])


class Separated(OneByOne, RunningSum):
    pass


def summed_by_hand(x, lengths):
    rows = [[y.cumsum(dim=0) for y in row.split(n)] for row, n in zip(x, lengths, strict=True)]
    return torch.stack([torch.cat(row) for row in rows])


@pytest.mark.parametrize("room", [(), ROOM], ids=["exact", "room"])
def test_every_document_is_summed_from_its_own_beginning(room):
    x = torch.randn(3, 23, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer = Separated()
    layer.documents = documents_of(ALL, capacity=room, longest=23)
    y = layer(x)
    torch.testing.assert_close(y, summed_by_hand(x, LENGTHS))
    assert not torch.allclose(y, RunningSum()(x))
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (ours,) = torch.autograd.grad(y, x, slope)
    (theirs,) = torch.autograd.grad(summed_by_hand(x, LENGTHS), x, slope)
    torch.testing.assert_close(ours, theirs)


def test_no_shape_depends_on_what_only_the_device_knows():
    """Fake tensors have no values, so nothing can be asked of them."""
    layer, documents = Separated(), documents_of(ALL, capacity=ROOM, longest=23)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer.documents = documents.each(mode.from_tensor)
        x = torch.empty(3, 23, 5, requires_grad=True)
        layer(x).sum().backward()
    assert x.grad is not None


def test_what_belongs_to_the_tokens_is_divided_as_they_are():
    """One mask for all rows, too, as rotary tables are."""
    x, mask = torch.ones(3, 23, 1), torch.arange(23.0)[None]
    layer = Separated()
    layer.documents = documents_of(ALL)
    expected = summed_by_hand(x, LENGTHS) * mask[..., None]
    torch.testing.assert_close(layer(hidden_states=x, mask=mask), expected)


def test_rows_of_one_document_each_are_handed_on_as_they_are():
    """With all that comes with them, as what cannot be divided."""
    layer = Separated()
    layer.documents = documents_of([23] * 3)
    x = torch.ones(3, 23, 1)
    with pytest.raises(RuntimeError, match="size of tensor"):
        layer(x, mask=torch.ones(3, 7))
    torch.testing.assert_close(layer(x), x.cumsum(dim=1))


def test_argument_that_cannot_be_divided_is_refused():
    layer = Separated()
    layer.documents = documents_of(ALL)
    with pytest.raises(UserError) as caught:
        layer(torch.ones(3, 23, 1), mask=torch.ones(3, 7))
    assert str(caught.value) == (
        "Separated keeps a state along the row and is given a tensor of shape (3, 7), which cannot "
        "be divided among the documents of a packed row. Set data.packing to false: each row is "
        "one document then."
    )
