"""Packed stacks of experts: any part of them decodes as the whole does."""

import pytest
import torch

from tests.support.stacks import packed_stack
from workflow.lib.model.layers import frozen_stack
from workflow.lib.model.layers.frozen_stack import FrozenStack
from workflow.lib.model.layers.weight_storage import NF4Spec
from workflow.lib.system.errors import UserError

# experts, out, in: rows that are whole blocks, and rows that are not
SHAPES = ((3, 24, 128), (7, 160, 48), (5, 96, 704))


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    size: tuple[int, int, int] = request.param
    return size


@pytest.mark.parametrize("double_quant", [True, False])
def test_parts_of_experts_decode_as_the_whole_stack_does(shape, double_quant, monkeypatch):
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stack = packed_stack(weights, double_quant=double_quant)
    whole = stack.dequantize(torch.float32).view(shape)
    torch.testing.assert_close(whole, weights, rtol=0, atol=0.7)
    for start, stop in ((0, shape[0]), (1, 3), (shape[0] - 1, shape[0])):
        part = stack.dequantize_experts(start, stop, torch.float32)
        assert torch.equal(part, whole[start:stop])
    monkeypatch.setattr(frozen_stack, "DECODED_BYTES", weights.nbytes // 3)
    rows, columns = [*stack.row_slices(torch.float32)], [*stack.column_slices(torch.float32)]
    assert len(rows) > 2
    assert len(columns) == (1 if shape[2] % 64 else -(-shape[2] // max(shape[2] // 192 * 64, 64)))
    parts = [stack.dequantize_rows(*slice_, torch.float32) for slice_ in rows]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    parts = [stack.dequantize_columns(*slice_, torch.float32) for slice_ in columns]
    assert torch.equal(torch.cat(parts, dim=2), whole)


def test_slices_fit_the_workspace():
    """Of 128 experts of 5,760 x 2,880 (gpt-oss 120B)."""
    spec = NF4Spec((128 * 5760, 2880), 64, double_quant=True, offset=0.0, experts=128)
    stack = FrozenStack(spec, compute_dtype=torch.bfloat16)
    for slices, size in (
        (stack.row_slices(torch.bfloat16), 2880),
        (stack.column_slices(torch.bfloat16), 5760),
    ):
        widths = [stop - start for start, stop in slices]
        assert sum(widths) == 5760 + 2880 - size
        assert max(widths) * size * 128 * 2 <= frozen_stack.DECODED_BYTES
        assert min(widths[:-1]) * size * 128 * 2 > 0.5 * frozen_stack.DECODED_BYTES


def test_slices_are_whole_tiles_of_the_product_and_alike():
    """Of 128 experts like those of Qwen3-30B-A3B: 2,730 rows of 768 weights would fit."""
    spec = NF4Spec((128 * 4096, 768), 64, double_quant=True, offset=0.0, experts=128)
    stack = FrozenStack(spec, compute_dtype=torch.bfloat16)
    assert [*stack.row_slices(torch.bfloat16)] == [(0, 2048), (2048, 4096)]
    spec = NF4Spec((128 * 1536, 2048), 64, double_quant=True, offset=0.0, experts=128)
    stack = FrozenStack(spec, compute_dtype=torch.bfloat16)
    columns = [*stack.column_slices(torch.bfloat16)]
    assert columns == [(0, 1024), (1024, 2048)]


def test_expert_that_begins_within_a_block_is_refused():
    spec = NF4Spec((3 * 7, 48), 64, double_quant=True, offset=0.0, experts=3)
    with pytest.raises(UserError, match=r"quantize.block_size: 64 does not divide the 336 weights"):
        FrozenStack(spec, compute_dtype=torch.float32)
