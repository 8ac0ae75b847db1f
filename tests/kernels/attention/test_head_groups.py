"""Attention whose backward takes some heads at a time."""

import pytest
import torch

from workflow.lib.kernels.attention.packed import (
    GROUPS,
    Kernels,
    by_head_groups,
    cudnn_kernels,
    varlen_kernels,
)

TOKENS, WIDTH = 13, 8


def attend(query, key, value):
    """Causal attention of heads (tokens, heads, width), and its logarithms of sums."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key)
    scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)


def kernels(seen):
    """Kernels that note the heads of keys of each backward, and check what they get."""

    def backward(grad, query, key, value, output, sums, state):
        seen.append(key.shape[1])
        assert grad.is_contiguous()
        assert output.is_contiguous()
        assert state.item() == 7
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        with torch.enable_grad():
            again, sums_again = attend(*leaves)
        torch.testing.assert_close((output, sums), (again.detach(), sums_again.detach()))
        return torch.autograd.grad(again, leaves, grad)

    return Kernels(lambda *heads: (*attend(*heads), torch.tensor(7)), backward, sums_dim=0)


@pytest.mark.parametrize(
    ("heads", "groups"),
    [((1, 1), [1]), ((6, 3), [1, 1, 1]), ((11, 11), [2] * 5 + [1]), ((40, 8), [1] * GROUPS)],
)
def test_gradients_are_those_of_all_heads_at_once(heads, groups):
    draw = torch.Generator().manual_seed(0)
    sizes = [(TOKENS, count, WIDTH) for count in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(x, dtype=torch.float64, generator=draw).requires_grad_() for x in sizes]
    grad = torch.randn(sizes[0], dtype=torch.float64, generator=draw)
    seen: list[int] = []
    output = by_head_groups(kernels(seen), *inputs)
    expected, _ = attend(*inputs)
    torch.testing.assert_close(output, expected)
    found = torch.autograd.grad(output, inputs, grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, inputs, grad))
    assert seen == groups


@pytest.mark.parametrize("kind", ["varlen", "cudnn"])
def test_arguments_of_kernels_are_those_of_torch_s_operators(kind):
    """On tensors without memory: operators check their arguments and make the shapes."""
    if kind == "varlen":
        sizes = [(TOKENS, heads, WIDTH) for heads in (4, 2, 2)]
        bounds = torch.empty(2, dtype=torch.int32, device="meta")
        tested = varlen_kernels(
            *(bounds, bounds, TOKENS, TOKENS),
            scale=None,
            window=(-1, 0),
            options={"enable_gqa": True},
        )
    else:
        sizes = [(2, heads, TOKENS, WIDTH) for heads in (4, 2, 2)]
        tested = cudnn_kernels(None, TOKENS)
    inputs = [torch.empty(x, dtype=torch.bfloat16, device="meta") for x in sizes]
    output, sums, *others = tested.forward(*inputs)
    assert sums.shape[tested.sums_dim] == 4
    made = tested.backward(torch.empty_like(output), *inputs, output, sums, *others)
    assert [tuple(x.shape) for x in made] == sizes
