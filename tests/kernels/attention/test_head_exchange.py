"""Attention over rows that processes share is that over whole rows: any heads, documents, windows,
caps and sinks, forward and backward."""

from dataclasses import dataclass, field

import pytest
import torch

from tests.kernels.attention.test_flex import layer
from tests.support.distributed import run_in_group
from tests.support.rounding import assert_rounded
from workflow.lib.kernels.attention.flex import flex_arguments, flex_attention
from workflow.lib.kernels.attention.head_exchange import RowCut, head_ranges

ROWS, TOKENS, WIDTH = 2, 12, 8  # a multiple of 2, 3 and 4 processes
LENGTHS = ((5, 1, 6), (12,))


@dataclass(frozen=True)
class Case:
    queries: int
    keys: int
    values: int = WIDTH
    """Width of a value."""
    arguments: dict = field(default_factory=dict)


CASES = {
    "as many heads of keys": Case(4, 4),
    "grouped": Case(8, 4, arguments={"sliding_window": 3, "softcap": 2.0}),
    "one head of keys": Case(5, 1, arguments={"s_aux": torch.tensor([0.5, -1.0, 3.0, 0.0, 1.0])}),
    "groups that are divided": Case(9, 3, values=6),
    "groups of an odd size": Case(14, 2, arguments={"sliding_window": 4, "scaling": 0.7}),
}


def positions():
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def drawn(case, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    shapes = [(case.queries, WIDTH), (case.keys, WIDTH), (case.keys, case.values)]
    tensors = [torch.randn(ROWS, n, TOKENS, width, generator=draw) for n, width in shapes]
    grad = torch.randn(ROWS, TOKENS, case.queries, case.values, generator=draw)
    return [x.to(dtype).requires_grad_() for x in tensors], grad.to(dtype)


def named(output, gradients):
    return dict(zip(("output", "query", "key", "value"), (output, *gradients), strict=True))


def whole_rows(case, dtype=torch.float32):
    inputs, grad = drawn(case, dtype)
    output, _ = flex_attention(
        layer(), *inputs, None, **flex_arguments(positions()), **case.arguments
    )
    return named(output.detach(), torch.autograd.grad(output, inputs, grad))


def slices(world):
    """Return by case this process's slice of the output and of the gradients."""
    width = TOKENS // world.size
    own = slice(world.rank * width, (world.rank + 1) * width)
    cut = RowCut(world.context, positions(), torch.zeros(0, dtype=torch.int64))
    found = {}
    for name, case in CASES.items():
        inputs, grad = drawn(case)
        inputs = [x.detach()[:, :, own].requires_grad_() for x in inputs]
        documents = flex_arguments(cut.position_ids)
        output, _ = flex_attention(
            layer(), *inputs, None, row_cut=cut, **documents, **case.arguments
        )
        found[name] = named(output.detach(), torch.autograd.grad(output, inputs, grad[:, own]))
    return found


@pytest.fixture(scope="module", params=[2, 3, 4], ids=lambda n: f"{n} processes")
def by_process(request):
    size = request.param
    return run_in_group(slices, world_size=size, context_parallel=size)


@pytest.mark.parametrize("name", CASES)
def test_slices_of_tokens_have_the_attention_of_whole_rows(by_process, name):
    joined = {
        key: torch.cat([found[name][key] for found in by_process], dim=1 if key == "output" else 2)
        for key in ("output", "query", "key", "value")
    }
    assert_rounded(joined, whole_rows(CASES[name]))


def test_heads_are_divided_as_equally_as_possible():
    assert head_ranges(9, 4) == [(0, 3), (3, 5), (5, 7), (7, 9)]
    assert head_ranges(3, 3) == [(0, 1), (1, 2), (2, 3)]


def test_more_processes_than_heads_are_an_error():
    with pytest.raises(AssertionError, match="3 heads are not enough for 4 processes"):
        head_ranges(3, 4)
