"""Which tokens are left of pairs and groups, and the keys that their queries see."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from workflow.lib.kernels.attention.flex_masks import MaskKind
from workflow.lib.kernels.attention.shared_prompts import SharedPrompts, prompt_mask

# A pair whose prompt has 2 tokens, two documents that share nothing, a prompt of 5, padding.
POSITIONS = np.array([[0, 1, 2, 3, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 0, 1]])
SIZES = {"queries": [4, 2, 3, 6, 4, 2], "keys": [4, 3, 3, 6, 8, 2]}
# Three answers to a prompt of 3 tokens, an answer alone, and two answers to one of 2.
GROUPS = np.array([[0, 1, 2, 3, 4, 2, 3, 2, 3, 4, 0, 1, 2, 0, 1, 2, 1, 2, 3]])
GROUP_SIZES = {"queries": [5, 2, 3, 3, 3, 3], "keys": [5, 4, 5, 3, 3, 4]}


@pytest.mark.parametrize(("positions", "sizes"), [(POSITIONS, SIZES), (GROUPS, GROUP_SIZES)])
@pytest.mark.parametrize("window", [None, 3])
def test_gathered_keys_are_those_that_the_mask_shows(positions, sizes, window):
    shared = SharedPrompts.of(positions)
    assert shared.bounds.diff().tolist() == sizes["keys"]
    assert shared.longest == max(sizes["keys"])
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(positions.size, 2, 3, generator=draw, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    )
    mask = prompt_mask(torch.from_numpy(positions), MaskKind(window=window))[0, 0]
    gathered = (q, shared.gathered(k), shared.gathered(v))
    parts = zip(
        *[x.split(sizes[of]) for x, of in zip(gathered, ("queries", "keys", "keys"), strict=True)],
        strict=True,
    )
    found = torch.cat([attended(*part, aligned_at_ends(part, window)) for part in parts])
    expected = attended(q, k, v, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slope = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), slope),
        torch.autograd.grad(expected, (q, k, v), slope),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("positions", [POSITIONS, GROUPS])
def test_padding_of_keys_changes_nothing(positions):
    """In a CUDA graph: keys that no query sees, whose gradient is unknown, and a further copy."""
    shared = SharedPrompts.of(positions)
    more, none = shared.keys.new_zeros(5), torch.full_like(shared.own, -1)[None]
    padded = replace(
        shared, keys=torch.cat([shared.keys, more]), copies=torch.cat([shared.copies, none])
    )
    x = torch.randn(positions.size, 2, 3).requires_grad_()
    keys, with_more = shared.gathered(x), padded.gathered(x)
    assert torch.equal(keys, with_more[: len(keys)])
    slope = torch.randn(keys.shape)
    (grad,) = torch.autograd.grad(keys, x, slope)
    unknown = torch.full((5, *slope.shape[1:]), float("nan"))
    (same,) = torch.autograd.grad(with_more, x, torch.cat([slope, unknown]))
    assert torch.equal(grad, same)


def aligned_at_ends(part, window):
    """Return what FlashAttention lets queries of one document see."""
    queries, keys = len(part[0]), len(part[1])
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (distance >= 0) & (distance < (window or keys))


def attended(q, k, v, mask):
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~mask, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
