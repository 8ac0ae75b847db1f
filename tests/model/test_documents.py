"""Packed rows are taken apart into documents and put together again without loss, in the shapes of
the documents or in those of a capacity."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from workflow.lib.model.documents import capacity_tokens, document_capacity, documents_of

ROWS = [[9, 1, 13], [23], [2, 2, 19]]
LENGTHS = [*chain.from_iterable(ROWS)]
OTHERS = [[23], [3, 20], [8, 8, 1, 6]]
LONGEST = 23
ROOM = tuple(
    map(
        max,
        *(document_capacity([*chain.from_iterable(r)], longest=LONGEST) for r in (ROWS, OTHERS)),
    )
)

shapes = pytest.mark.parametrize("room", [(), ROOM], ids=["exact", "room"])


def documents(room, rows=ROWS):
    return documents_of([*chain.from_iterable(rows)], capacity=room, longest=LONGEST)


def rows_of(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


@shapes
def test_rows_are_put_together_as_they_were(room):
    x = rows_of(3, 23, 2)
    apart = documents(room)
    parts = apart.apart(x)
    assert [part.shape[:2] for part in parts] == [*apart.shapes]
    y = apart.together(parts, x.shape[:2])
    torch.testing.assert_close(y, x)
    (gradient,) = torch.autograd.grad(y, x, 2 * x.detach())
    torch.testing.assert_close(gradient, 2 * x.detach())


def test_room_gives_other_rows_the_same_shapes():
    one, other = documents(ROOM), documents(ROOM, OTHERS)
    assert one.shapes == other.shapes
    assert one.positions is not None
    assert other.positions is not None
    assert one.positions.shape == other.positions.shape
    assert not torch.equal(one.positions, other.positions)


def test_room_is_a_few_rows_more_than_what_is_needed():
    """The k-th longest document of any rows has a row of the length that it needs."""
    assert document_capacity(LENGTHS, longest=LONGEST) == (7, 6, 4, 4, 2)
    assert documents(ROOM).shapes == ((2, 23), (2, 16), (1, 8), (1, 4), (1, 2))
    assert capacity_tokens(ROOM, longest=LONGEST) == 2 * 23 + 2 * 16 + 8 + 4 + 2
    with pytest.raises(AssertionError, match="longer than its group"):
        documents(ROOM, [[17, 6], [23], [23]])


def test_documents_of_one_length_are_not_copied():
    apart = documents_of([23, 23, 23])
    assert apart.are_rows((3, 23, 5))
    assert not documents_of([69]).are_rows((3, 23, 5))
    x = torch.randn(1, 69, 2)
    (part,) = apart.apart(x)
    assert part.shape == (3, 23, 2)
    assert part.data_ptr() == x.data_ptr() == apart.together([part], x.shape[:2]).data_ptr()


def test_fewer_than_half_of_the_places_are_filled_up():
    lengths = [*[1] * 5, 2, 2, 5, 9, 20, 3, 4, 7, 12]
    apart = documents_of(lengths)
    assert sum(count * length for count, length in apart.shapes) < 2 * sum(lengths)
    assert len(apart.shapes) <= (23).bit_length()


def test_moved_documents_are_the_same():
    apart = documents(())
    assert apart.each(lambda x: x) == replace(apart)
    assert documents_of([23, 23]).each(torch.clone) == documents_of([23, 23])
