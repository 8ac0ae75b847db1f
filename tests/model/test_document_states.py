"""Recurrent layers begin anew with every packed document; rows are taken apart and put together
again without loss.
"""

from typing import Any

import pytest
import torch
from torch import nn

from workflow.lib.model.document_states import OneByOne, documents_of
from workflow.lib.system.errors import UserError

LENGTHS = [[9, 1, 13], [23], [2, 2, 19]]


def positions(lengths: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


class RunningSum(nn.Module):
    """The simplest recurrent layer: each token's output is the sum of all tokens up to it."""

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return hidden_states.cumsum(dim=1) * (1 if mask is None else mask[..., None])


class Separated(OneByOne, RunningSum):
    pass


def summed_by_hand(x: torch.Tensor, lengths: list[list[int]]) -> torch.Tensor:
    rows = [[y.cumsum(dim=0) for y in row.split(n)] for row, n in zip(x, lengths, strict=True)]
    return torch.stack([torch.cat(row) for row in rows])


def test_every_document_is_summed_from_its_own_beginning() -> None:
    x = torch.randn(3, 23, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer = Separated()
    layer.documents = documents_of(positions(LENGTHS))
    y = layer(x)
    torch.testing.assert_close(y, summed_by_hand(x, LENGTHS))
    assert not torch.allclose(y, RunningSum()(x))
    slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (ours,) = torch.autograd.grad(y, x, slope)
    (theirs,) = torch.autograd.grad(summed_by_hand(x, LENGTHS), x, slope)
    torch.testing.assert_close(ours, theirs)


def test_what_belongs_to_the_tokens_is_divided_as_they_are() -> None:
    """One mask for all rows, too, as rotary tables are."""
    x, mask = torch.ones(3, 23, 1), torch.arange(23.0)[None]
    layer = Separated()
    layer.documents = documents_of(positions(LENGTHS))
    expected = summed_by_hand(x, LENGTHS) * mask[..., None]
    torch.testing.assert_close(layer(hidden_states=x, mask=mask), expected)


def test_rows_of_one_document_each_are_handed_on_as_they_are() -> None:
    assert documents_of(positions([[23], [23]])) is None


def test_fewer_than_half_of_the_places_are_filled_up() -> None:
    lengths = [[1] * 5 + [2] * 2 + [5, 9], [20, 3], [4, 7, 12]]
    documents = documents_of(positions(lengths))
    assert documents is not None
    assert sum(places.numel() for places, _ in documents.groups) < 2 * 3 * 23
    assert len(documents.groups) <= (23).bit_length()


def test_argument_that_cannot_be_divided_is_refused() -> None:
    layer = Separated()
    layer.documents = documents_of(positions(LENGTHS))
    with pytest.raises(UserError) as caught:
        layer(torch.ones(3, 23, 1), mask=torch.ones(3, 7))
    assert str(caught.value) == (
        "Separated keeps a state along the row and is given a tensor of shape (3, 7), which cannot "
        "be divided among the documents of a packed row. Set data.packing to false: each row is "
        "one document then."
    )
