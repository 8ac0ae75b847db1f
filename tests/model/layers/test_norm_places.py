"""Where the kernels of norms find the rows of a tensor, which CI computes without them."""

import pytest
import torch

from workflow.lib.kernels.rows.norm import _readable, _strides

NUMBERS = torch.arange(2 * 5 * 7 * 9 * 4)
WIDE = NUMBERS.view(2, 5, 7, 36)[..., 8:20]
LAYOUTS = {
    "contiguous": (NUMBERS.view(2, 5, 7, 36), False),
    "two dimensions": (NUMBERS.view(70, 36), False),
    "part of each head": (WIDE, False),
    "some heads": (NUMBERS.view(2, 5, 7, 36)[:, :, 1:4], False),
    "heads before tokens": (WIDE[:1].transpose(1, 2), False),
    "one head": (WIDE[:, :, 2:3], False),
    "one token a row": (WIDE[:, 3:4], False),
    "heads before tokens of two rows": (WIDE.transpose(1, 2), True),
    "columns apart": (NUMBERS.view(2, 5, 7, 36)[..., ::2], True),
    "columns of rows": (NUMBERS.view(70, 36)[:, 4:12], True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_lie_where_kernels_read_them(layout):
    x, copied = LAYOUTS[layout]
    taken = _readable(x)
    assert (taken is not x) == copied
    heads, token, head = _strides(taken)
    rows = torch.arange(x.numel() // x.shape[-1])
    first = rows // heads * token + rows % heads * head + taken.storage_offset()
    memory = torch.as_strided(taken, (int(first.max()) + x.shape[-1],), (1,), 0)
    found = memory[first[:, None] + torch.arange(x.shape[-1])]
    assert torch.equal(found, x.reshape(-1, x.shape[-1]))
