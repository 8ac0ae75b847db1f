"""Other attentions than the one that a CPU takes give the families' losses and gradients, which
`tests/training/test_families.py` compares with those of stock packages."""

import itertools

import numpy as np
import pytest
import torch

from tests.support.families import FAMILIES, FamilyCase, tiny_model
from tests.support.family_runs import attention_of, family_store, randomize_
from tests.support.models import adapted, quantized
from workflow.lib.kernels.attention import packed as packed_attention
from workflow.lib.model.fusion.fuse_layers import fuse_layers_
from workflow.lib.model.lora import trainable_parameters
from workflow.lib.training.batches import stored_batch

CPU = torch.device("cpu")
WINDOWS = ("mistral", "gemma3_text")
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4}
LONG_ROPE |= {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
CASES = {name: FAMILIES[name] for name in ("llama", "qwen2", *WINDOWS)} | {
    "phi3": FamilyCase(
        "short factors of LongRoPE",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 29},
    ),
    "grouped by one": FamilyCase("as many keys as heads", {"num_key_value_heads": 3}, "llama"),
}
# Fused modules of two layers.
PLAIN = {"norms": 4, "projections": 2, "rotations": 2, "feed_forwards": 2}
FUSED = dict.fromkeys(CASES, PLAIN) | {
    "gemma3_text": PLAIN | {"norms": 12},
    "phi3": {"norms": 4, "rotations": 2, "feed_forwards": 2},
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return str(request.param)


@pytest.fixture(scope="module")
def base(case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return quantized(tiny_model(CASES[case].config(case), folder / "original"), folder / "nf4")


def trained(training):
    randomize_(training)
    store = family_store("packed")
    loss = training.train()(stored_batch(store, np.arange(len(store.input_ids))))
    loss.backward()
    gradients = {name: param.grad for name, param in trainable_parameters(training).items()}
    return {"loss": loss.detach(), "gradients": gradients}


@pytest.fixture(scope="module")
def expected(base):
    return trained(adapted(base, attention=attention_of(base), r=3))


def assert_same(result, expected):
    torch.testing.assert_close(result["loss"], expected["loss"], rtol=1e-5, atol=0)
    for name, gradient in expected["gradients"].items():
        atol = 1e-5 * float(gradient.abs().max())  # fp32, sums in another order
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-3, atol=atol)


def plain_attention(kernels, q, k, v, **_):
    """What torch's kernels do on a GPU: (tokens, heads, head_dim), document by document,
    `window[0]` tokens back."""
    bounds, scale, window = kernels
    outputs = []
    for start, stop in itertools.pairwise(bounds.tolist()):
        heads = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        back = window[0] if window[0] >= 0 else stop
        seen = torch.ones(stop - start, stop - start, dtype=torch.bool).tril().triu(-back)
        output = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=seen, scale=scale, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_varlen_is_told_all_that_a_family_asks_of_its_attention(
    case, base, expected, fused, monkeypatch
):
    """The kernel is for GPUs, so its definition takes its place; an argument that it does not know
    would raise."""
    monkeypatch.setattr(
        packed_attention,
        "varlen_kernels",
        lambda bounds, *_, scale, window: (bounds, scale, window),
    )
    monkeypatch.setattr(packed_attention, "by_head_groups", plain_attention)
    training = adapted(base, attention="varlen", r=3)
    if fused:
        assert fuse_layers_(training.peft_model.get_base_model()) == FUSED[case]  # type: ignore[operator]
    assert_same(trained(training), expected)
