"""Tiles of tokens, attention by groups of heads and its kept results, on a GPU."""

import pytest
import torch

from tests.gpu.test_engine import assert_alike, trained
from workflow.lib.kernels.attention.packed import varlen_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("processes", [1, 2], ids=lambda n: f"{n} GPUs")
@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_tiles_train_the_run_of_whole_rows(tiny_base, enough_gpus, processes, attention):
    options = {
        "processes": processes, "dtype": torch.bfloat16, "attention": attention, "rows": 2,
    }  # fmt: skip
    whole, tiled = (trained(tiny_base, **options, tile_tokens=tokens) for tokens in (0, 7))
    assert_alike(tiled, whole, dtype=torch.bfloat16)


OFFLOADED = {"offload_activations": True, "offload_window_bytes": 2**15}


@pytest.mark.parametrize("processes", [1, 2], ids=lambda n: f"{n} GPUs")
@pytest.mark.parametrize(
    "levers", [{}, OFFLOADED, {"tile_tokens": 7}], ids=["plain", "offloaded", "tiles"]
)
def test_recomputed_layers_that_keep_attention_train_the_same_run(
    tiny_base, enough_gpus, processes, levers
):
    options = {"processes": processes, "dtype": torch.bfloat16, "attention": "varlen", **levers}
    again, kept = (trained(tiny_base, **options, keep_attention=x) for x in (False, True))
    assert_alike(kept, again, dtype=torch.bfloat16)


@pytest.mark.parametrize("bounds", [(0, 512, 1024), (0, 70, 1000, 1024)], ids=["equal", "packed"])
def test_attention_in_head_groups_is_that_of_all_heads(one_gpu, bounds):
    """Documents of one length go to cuDNN from Hopper on. Sums are in another order."""
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = [(1, heads, bounds[-1], 64) for heads in (20, 10, 10)]
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": draw}
    heads = [torch.randn(x, **options).requires_grad_() for x in sizes]
    cuts = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    longest = int(cuts.diff().max())
    results = []
    for in_head_groups in (False, True):
        output, _ = varlen_attention(
            torch.nn.Module(), *heads, None, cu_seq_lens_q=cuts, max_length_q=longest,
            in_head_groups=in_head_groups,
        )  # fmt: skip
        grad = torch.ones_like(output)
        results.append([output, *torch.autograd.grad(output, heads, grad)])
    torch.testing.assert_close(results[1], results[0], rtol=3e-2, atol=3e-2)
