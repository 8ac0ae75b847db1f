"""That a block mask lists the blocks that queries see, as torch would find them element by
element."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from workflow.lib.kernels.attention.flex_masks import MaskKind, PackedMasks, block_mask, first_keys

ROWS = [
    [[300, 17, 130, 1, 52], [500]],  # the last block is not whole
    [[128, 128, 256], [1] * 512],
    [[255, 256, 1], [512]],
    [[70], [70]],  # less than a block
]
KINDS = [MaskKind(), MaskKind(window=100), MaskKind(128), MaskKind(1), MaskKind(chunk=96)]


def positions(rows):
    """Return position ids (rows, seq_len) of documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def seen_one_by_one(position_ids, kind):
    """Return which keys each query sees (rows, queries, keys), from what documents, windows and
    chunks are."""
    rows, length = position_ids.shape
    document = (position_ids == 0).cumsum(1)
    places = torch.arange(length)
    seen = (places <= places[:, None]) & (document[:, :, None] == document[:, None])
    if kind.window is not None:
        seen &= places > places[:, None] - kind.window
    if kind.chunk is not None:
        chunk = position_ids // kind.chunk
        seen &= chunk[:, :, None] == chunk[:, None]
    return seen.expand(rows, length, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_first_key_and_order_say_what_a_query_sees(rows, kind):
    position_ids = positions(rows)
    first = first_keys(position_ids, kind)
    places = torch.arange(position_ids.shape[1])
    seen = (places <= places[:, None]) & (places >= first[:, :, None])
    assert torch.equal(seen, seen_one_by_one(position_ids, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ROWS)
def test_blocks_are_those_that_torch_finds(rows, kind):
    position_ids = positions(rows)
    ours = block_mask(first_keys(position_ids, kind))
    count, length = position_ids.shape
    theirs = create_block_mask(ours.mask_mod, count, None, length, length, device="cpu")
    assert ours.shape == theirs.shape
    for name in ("kv", "full_kv", "q", "full_q"):
        counted, other = (getattr(mask, f"{name}_num_blocks") for mask in (ours, theirs))
        assert torch.equal(counted, other), name
        indices, others = (getattr(mask, f"{name}_indices") for mask in (ours, theirs))
        listed = torch.arange(indices.shape[-1]) < counted[..., None]
        assert torch.equal(indices[listed], others[listed]), name


def test_mask_of_a_kind_is_made_once():
    masks = PackedMasks(positions(ROWS[0]))
    assert masks.block_mask(MaskKind(100)) is masks.block_mask(MaskKind(100))
    assert masks.block_mask(MaskKind(100)) is not masks.block_mask(MaskKind())
